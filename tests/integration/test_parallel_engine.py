"""The processes of a tensor-parallel engine end together, alone and in a run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.config.schema import RolloutConfig
from keepstep.processes import ProcessRef, descendants, kill
from keepstep.rollout.environment import engine_environment
from tests.integration.driver import Driver, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENDS_WITHIN_S = 20
"""Of the time limits that would end it otherwise the least, vLLM's own for one step of the model, is 300 s."""

SCRIPT = """
import sys
import torch
from keepstep.config.schema import RolloutConfig
from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer
from keepstep.rollout.types import Request
from keepstep.rollout.vllm_engine import VllmEngine

tokenizer = build_tokenizer()
model = build_model(tokenizer)
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
engine = VllmEngine(sys.argv[1], RolloutConfig(tensor_model_parallel_size=2), max_model_len=112, device="cpu")
engine.update_weights({name: value.detach().numpy() for name, value in model.named_parameters()}, 0)
requests = [Request(tokenizer.encode(f"{a}+{a}="), a) for a in range(8)]
print("READY", *(pid for pid, _ in engine.workers()), flush=True)
try:
    while True:
        engine.generate(requests, version=0, max_tokens=64, temperature=1.0)
except Exception as error:
    # A call that fails is a bug to whoever made it; a process that ends is a lost engine.
    print(error)
    sys.exit(3)
"""


@dataclass
class Engine:
    process: subprocess.Popen[str]
    workers: list[int]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine of two workers that generates without end."""
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "model")], stdout=subprocess.PIPE, stderr=stderr, text=True,
            env=os.environ | engine_environment(RolloutConfig(), "cpu", 0) | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
    assert process.stdout is not None
    ready = next((line for line in process.stdout if line.startswith("READY")), "")
    assert ready, (tmp_path / "stderr").read_text()[-3000:]
    yield Engine(process, [int(pid) for pid in ready.split()[1:]])
    kill(refs([process.pid, *descendants(process.pid)]))
    process.wait(timeout=30)


def refs(pids: list[int]) -> list[ProcessRef]:
    return [ref for pid in pids if (ref := ProcessRef.of(pid, "engine"))]


def named_memory(pid: int) -> list[str]:
    """What a process has mapped of /dev/shm and would stay there without it."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_the_processes_of_an_engine_end_together(engine: Engine, victim: str):
    """C160: a peer of the dead waits in a collective without a time limit, and is not left there; nor is its memory."""
    pid, workers = engine.process.pid, engine.workers
    assert len(workers) == 2
    everyone = refs([pid, *descendants(pid)])
    assert {pid, *workers} <= {ref.pid for ref in everyone}
    assert [named_memory(one) for one in (pid, *workers)] == [[], [], []]
    os.kill(workers[1] if victim == "worker" else pid, signal.SIGKILL)
    assert engine.process.wait(timeout=ENDS_WITHIN_S) == (1 if victim == "worker" else -signal.SIGKILL)
    assert wait_until_gone(everyone, timeout_s=ENDS_WITHIN_S) == []


@pytest.mark.long
def test_a_lost_worker_costs_no_step(workspace: Path):
    """C160: the engine is replaced in place, and its log-probs stay the trainer's; nothing is left of the old one."""
    settings = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.total_training_steps=6"]
    hit = Driver(workspace / "parallel", [*settings, "s3.embedded=false"], command="train")
    hit.start()
    hit.wait_for_step(2)
    hit.kill("engine-worker")
    assert hit.wait(240) == 0, hit.tail()
    events = hit.events()
    assert [(e["role"], e["lost"]) for e in events if e["event"] == "worker_lost"] == [("engine", ["engine 0"])]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    workers = [ref for ref in hit.processes() if ref.role == "engine-worker"]
    assert len(workers) == 4, "two of each engine are in the record"
    assert wait_until_gone(workers) == []
