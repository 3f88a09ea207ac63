"""Reading a checkpoint of layout `full` into plain tensors. Heavy half: imports torch, never unpickles code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import layout
from keepstep.errors import CheckpointError
from keepstep.run import read_json

_FILES = {"actor": layout.ACTOR, "optimizer": layout.OPTIMIZER, "scheduler": layout.SCHEDULER, "ref": layout.REF}


def read(folder: Path, *, with_reference: bool) -> dict[str, Any]:
    """{actor, optimizer, scheduler, ref, trainer_state} of a verified checkpoint; tensors are memory-mapped.

    Raises:
        CheckpointError: a file cannot be loaded with `weights_only=True`.
    """
    names = [name for name in _FILES if name != "ref" or with_reference]
    state = {name: read_tensors(folder / _FILES[name]) for name in names}
    return state | {"trainer_state": read_json(folder / layout.TRAINER_STATE)}


def read_tensors(path: Path) -> Any:
    """One file of a checkpoint, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}", "Verify it: keepstep verify " + str(path.parent)
        ) from error
