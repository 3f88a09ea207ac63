"""Reading the tensors of a checkpoint, of either layout. Heavy half: imports torch, never unpickles code.

A role's tensors are a `Source`: `FullFile` (one torch.save file, memory-mapped) or `shard_folder.ShardFolder`
(safetensors of torch.distributed.checkpoint).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from keepstep.actor.shards import copy_chunks
from keepstep.checkpoint import layout
from keepstep.errors import CheckpointError, OutOfMemoryError, is_out_of_memory
from keepstep.run import read_json

OUT_OF_MEMORY_REMEDY = "See who holds memory: keepstep preflight --clean ends what earlier attempts left."
ACTOR, OPTIMIZER, REF = "actor", "optimizer", "ref"
ROLE_FILES = {ACTOR: layout.ACTOR, OPTIMIZER: layout.OPTIMIZER, REF: layout.REF}
ROLE_DIRS = {ACTOR: layout.ACTOR_SHARDS, OPTIMIZER: layout.OPTIMIZER_SHARDS, REF: layout.REF_SHARDS}


class Source(Protocol):
    """One role's tensors by name; the optimizer's are `state.<parameter>.<key>`."""

    def names(self) -> set[str]: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def fill(self, targets: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        """Copy into tensors of the same names; of a sharded one (DTensor) this rank's part."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, whole."""
        ...


class FullFile:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def fill(self, targets: dict[str, torch.Tensor], rank: int, world_size: int) -> None:
        copy_chunks(targets, self._tensors, rank, world_size)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors


def read_role(folder: Path, role: str, staged: Path | None = None) -> Source:
    """The tensors of `actor`, `optimizer` or `ref`; from `staged` what this node has of its own.

    Raises:
        CheckpointError: they cannot be loaded (`weights_only=True` for what is pickled).
    """
    if (folder / ROLE_FILES[role]).exists():
        value = read_file((staged or folder) / ROLE_FILES[role])
        return FullFile(_flat_state(value["state"]) if role == OPTIMIZER else value)
    if not (folder / ROLE_DIRS[role]).is_dir():
        raise CheckpointError(f"{folder} has neither {ROLE_FILES[role]} nor {ROLE_DIRS[role]}.", _remedy(folder))
    from keepstep.checkpoint.shard_folder import ShardFolder

    try:
        return ShardFolder(folder / ROLE_DIRS[role], staged / ROLE_DIRS[role] if staged else None)
    except Exception as error:
        raise CheckpointError(f"{folder / ROLE_DIRS[role]} cannot be loaded: {error}", _remedy(folder)) from error


def read_param_groups(folder: Path) -> list[dict[str, Any]]:
    """The optimizer's hyper-parameters."""
    if (folder / layout.OPTIMIZER).exists():
        return read_file(folder / layout.OPTIMIZER)["param_groups"]
    # JSON has no tuples, and torch compares betas with one.
    return [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}
        for group in read_json(folder / layout.PARAM_GROUPS)
    ]


def read_file(path: Path) -> Any:
    """One torch.save file of a checkpoint, on the CPU, memory-mapped."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if is_out_of_memory(error):
            # The file is blameless.
            raise OutOfMemoryError(f"Loading {path}: out of memory ({error}).", OUT_OF_MEMORY_REMEDY) from error
        raise CheckpointError(f"{path} cannot be loaded: {error}", _remedy(path.parent.parent)) from error


def _flat_state(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"state.{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}


def _remedy(folder: Path) -> str:
    return f"Verify it: keepstep verify {folder}"
