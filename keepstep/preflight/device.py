"""Where ranks and engines compute. Light: asking torch would take seconds."""

from __future__ import annotations

from pathlib import Path

from keepstep.errors import ConfigError

_CUDA_CONTROL = Path("/dev/nvidiactl")


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`; `auto` is CUDA where its driver is.

    Raises:
        ConfigError: CUDA is asked for and no driver is here.
    """
    if device == "auto":
        return "cuda" if _CUDA_CONTROL.exists() else "cpu"
    if device == "cuda" and not _CUDA_CONTROL.exists():
        raise ConfigError("trainer.device=cuda, but this machine has no CUDA driver.", "Use trainer.device=cpu.")
    return device
