"""What is checked on every node of the job: ports, GPU memory, the shared folder, the clock, a compiler. Light.

`answers` runs where it is called: here, or through Ray on each node. It takes and gives plain data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError, KeepstepError
from keepstep.preflight.device import check_compiler, resolve_device
from keepstep.preflight.folder import existing_parent
from keepstep.preflight.port import check_port, holder_of
from keepstep.processes import hostname
from keepstep.rollout.environment import PORTS_PER_ENGINE
from keepstep.run import RunDir

PORT_KEY = "actor_rollout_ref.rollout.port"
SMI_TIMEOUT_S = 20.0
SKEW_WARN_S = 5.0
MOST_FREE_SHARE = 0.95
"""More than this no GPU has free, not even an idle one."""
RESERVE_SHARE = 0.05
"""Of a GPU's memory, for what the driver and the kernels take beside the engine and the rank."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a node needs to know. Plain data: it travels."""

    num_engines: int
    first_port: int
    device: str
    memory_share: float
    """Of each GPU, what the engine takes."""
    folder: str
    """The run's folder, or the nearest that exists above it."""
    max_skew_s: float
    """Above it leases of other hosts are judged wrongly."""
    compiles: bool = False
    """Whether its ranks run through torch.compile."""
    token: str = ""
    """A file of this name was written into `folder` by the node that asks; empty: there is no other node."""


def request(config: RunConfig, run: RunDir) -> Request:
    return Request(
        # On a cluster any engine may come to stand here, one of them at least.
        num_engines=config.actor_rollout_ref.rollout.num_engines if config.ray.address is None else 1,
        first_port=config.actor_rollout_ref.rollout.port,
        device=resolve_device(config),
        memory_share=config.actor_rollout_ref.rollout.gpu_memory_utilization,
        folder=str(existing_parent(run.root)),
        max_skew_s=config.retry.lease_timeout_s / 2,
        compiles=config.actor_rollout_ref.actor.use_torch_compile,
    )


def answers(asked: Request) -> list[Answer]:
    """One record per check, as `checks.Check` takes it."""
    made = [("port", _port), ("gpu_memory", _gpu_memory), ("shared_folder", _shared_folder), ("clock", _clock)]
    if asked.compiles:
        made.append(("compiler", _compiler))
    return [answer_of(name, partial(check, asked)) for name, check in made]


def answer_of(name: str, check: Callable[[], tuple[str, str]]) -> Answer:
    """What a check says, or what it raises."""
    try:
        status, sentence = check()
        answer: Answer = {"status": status, "sentence": sentence}
    except KeepstepError as error:
        answer = {"status": "fail", "sentence": error.message, "remedy": error.remedy, "exit_code": error.exit_code}
    except Exception as error:
        answer = {"status": "warn", "sentence": f"the check itself failed: {type(error).__name__}: {error}"}
    return {"id": name, "node": hostname(), **answer}


def _port(asked: Request) -> tuple[str, str]:
    ports = [asked.first_port + PORTS_PER_ENGINE * index for index in range(asked.num_engines)]
    for port in ports:
        check_port(port, PORT_KEY)
    return "ok", f"port {', '.join(map(str, ports))} is free"


def _gpu_memory(asked: Request) -> tuple[str, str]:
    if asked.device != "cuda":
        return "skipped", "ranks and engines compute on the CPU"
    gpus = [gpu for gpu in _smi("--query-gpu=index,memory.total,memory.free") if _is_ours(gpu[0]) and _has_sizes(gpu)]
    if not gpus:
        return "skipped", "nvidia-smi tells of no GPU of ours with a size"
    needed = min(MOST_FREE_SHARE, asked.memory_share + RESERVE_SHARE)
    short = [gpu for gpu in gpus if int(gpu[2]) < needed * int(gpu[1])]
    if short:
        names = "; ".join(f"GPU {index}: {free} of {total} MiB free" for index, total, free in short)
        raise ConfigError(
            f"{names}; the engine alone takes {needed:.0%}. Held by {_holders()}.",
            "End what holds it (keepstep preflight --clean ends what earlier attempts left), or lower "
            "actor_rollout_ref.rollout.gpu_memory_utilization.",
        )
    return "ok", "; ".join(f"GPU {index}: {free} of {total} MiB free" for index, total, free in gpus)


def _is_ours(index: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, where it lists indices, leaves this GPU to us."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return not all(entry.strip().isdecimal() for entry in visible) or index in [entry.strip() for entry in visible]


def _has_sizes(gpu: list[str]) -> bool:
    """A GPU in slices, or one that shares the host's memory, answers `[N/A]`."""
    return len(gpu) == 3 and gpu[1].isdecimal() and gpu[2].isdecimal()


def _smi(query: str) -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        raise ConfigError("trainer.device is cuda, and there is no nvidia-smi to ask for free memory.", "Install it.")
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ConfigError(f"nvidia-smi failed: {done.stdout.strip() or done.stderr.strip()}", "Look at the driver.")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _holders() -> str:
    pids = [row[0] for row in _smi("--query-compute-apps=pid,used_memory")]
    return ", ".join(holder_of(int(pid)) for pid in pids[:4] if pid.isdigit()) or "nobody that nvidia-smi names"


def _shared_folder(asked: Request) -> tuple[str, str]:
    if not asked.token:
        return "skipped", "one node: nothing to share"
    if not (Path(asked.folder) / asked.token).is_file():
        raise ConfigError(
            f"{hostname()} does not see what another node wrote into {asked.folder}: it is not one filesystem.",
            "Put trainer.output_dir on storage that all nodes share.",
        )
    return "ok", f"{asked.folder} is the same here"


def _clock(asked: Request) -> tuple[str, str]:
    """Against the filesystem, whose server may have a clock of its own."""
    probe = Path(asked.folder) / f".clock-{uuid.uuid4().hex}"
    before = time.time()
    probe.touch()
    stamped = probe.stat().st_mtime
    probe.unlink()
    return judge_clock(before, stamped, time.time(), f"the filesystem of {asked.folder}", asked.max_skew_s)


def _compiler(asked: Request) -> tuple[str, str]:
    check_compiler(asked.device)
    return "ok", "a compiler and Python's headers are here"


def judge_clock(asked_s: float, said_s: float, answered_s: float, other: str, max_skew_s: float) -> tuple[str, str]:
    """(status, sentence) of another clock that said `said_s` between two readings of ours. Pure.

    What lies between the two readings is no skew, however long the answer took.

    Raises:
        ConfigError: the clocks are further apart than leases bear.
    """
    skew_s = max(asked_s - said_s, said_s - answered_s, 0.0)
    sentence = f"{skew_s:.1f} s from {other}"
    if skew_s > max_skew_s:
        raise ConfigError(
            f"A clock is {sentence}: leases of other hosts would be judged wrongly.",
            "Set the clocks by NTP, or raise retry.lease_timeout_s.",
        )
    return ("warn" if skew_s > SKEW_WARN_S else "ok"), sentence
