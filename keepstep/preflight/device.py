"""Where ranks and engines compute. Light: asking torch would take seconds."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError

_CUDA_CONTROL = Path("/dev/nvidiactl")


def has_cuda() -> bool:
    """Whether a CUDA driver is on this machine."""
    return _CUDA_CONTROL.exists()


def resolve_device(config: RunConfig) -> str:
    """`cpu` or `cuda`, what a run's ranks and engines compute on; `auto` is CUDA where its driver is.

    With `ray.address` they are on other machines, as a rule: flow and controller may stand where no GPU is. Then CUDA
    is taken at its word, and the cluster is asked for its GPUs when the attempt begins.

    Raises:
        ConfigError: CUDA is asked for and no driver is here; or it cannot be told from here.
    """
    device, elsewhere = config.trainer.device, config.ray.address is not None
    if device == "cpu":
        return "cpu"
    if has_cuda() or (device == "cuda" and elsewhere):
        return "cuda"
    if device == "cuda":
        raise ConfigError("trainer.device=cuda, but this machine has no CUDA driver.", "Use trainer.device=cpu.")
    if elsewhere:
        raise ConfigError(
            "trainer.device=auto is what this machine has, and it has no GPU; the nodes of ray.address may have some.",
            "Say which: trainer.device=cuda or trainer.device=cpu.",
        )
    return "cpu"


def check_device(config: RunConfig) -> None:
    """Whether the settings can be had on the device that they name.

    Raises:
        ConfigError: no driver is here, or the device does not take a setting, or what it needs is not installed.
    """
    device = resolve_device(config)
    if config.actor_rollout_ref.actor.use_torch_compile and config.ray.address is None:
        check_compiler(device)
    if device == "cpu":
        return
    size, there = config.actor_rollout_ref.rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
    if there % size and config.actor_rollout_ref.hybrid_engine:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide trainer.n_gpus_per_node="
            f"{there}: the GPUs of an engine are of one node, beside ranks.",
            f"Give a divisor of {there}.",
        )
    if not config.actor_rollout_ref.hybrid_engine and config.ray.address is None:
        _check_own_gpus(config)
    if config.recovery.warm_spare:
        raise ConfigError(
            "recovery.warm_spare=true keeps no spare for a GPU: it would need memory of the one that it stands for.",
            "Leave it out, or train with trainer.device=cpu.",
        )


def _check_own_gpus(config: RunConfig) -> None:
    """Ray would wait for a GPU that this machine does not have until the time limit of the start."""
    rollout = config.actor_rollout_ref.rollout
    num_ranks, num_engines, size = config.world_size, rollout.num_engines, rollout.tensor_model_parallel_size
    num_needed, num_here = num_ranks + num_engines * size, num_gpus()
    if num_needed > num_here:
        raise ConfigError(
            f"actor_rollout_ref.hybrid_engine=false gives ranks and engines GPUs of their own, {num_ranks} + "
            f"{num_engines} * {size}, and this machine has {num_here}.",
            "Lower trainer.n_gpus_per_node or actor_rollout_ref.rollout.num_engines, or let them share: leave "
            "actor_rollout_ref.hybrid_engine out.",
        )


def num_gpus() -> int:
    """CUDA devices of this machine that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in _CUDA_CONTROL.parent.glob("nvidia*"))


def check_compiler(device: str) -> None:
    """torch.compile writes C++ on the CPU, and C that launches kernels on a GPU; both are compiled against Python.

    Raises:
        ConfigError: no compiler is here, or no header of Python.
    """
    setting = "actor_rollout_ref.actor.use_torch_compile=true"
    variable, usual = ("CXX", ("g++",)) if device == "cpu" else ("CC", ("gcc", "clang"))
    names = (os.environ[variable],) if os.environ.get(variable) else usual
    if not any(map(shutil.which, names)):
        raise ConfigError(
            f"{setting} needs a compiler on every node, and there is no {' or '.join(names)} here.",
            f"Install it (Debian: apt-get install g++), name another in {variable}, or leave the setting out.",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ConfigError(
            f"{setting} needs Python's headers on every node, and there is no {header} here.",
            "Install them (Debian: apt-get install python3-dev, of this Python's version), or leave the setting out.",
        )
