"""The policy's tensors of any checkpoint, one at a time: our two layouts, and verl's FSDP rank files."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from keepstep.checkpoint import layout
from keepstep.checkpoint.reader import ACTOR, Source, read_role
from keepstep.errors import CheckpointError, first_line

Shape = tuple[int, ...]
_RANK_FILE = re.compile(r"model_world_size_([1-9]\d*)_rank_(0|[1-9]\d*)\.pt")


class Weights(Protocol):
    def shapes(self) -> dict[str, Shape]: ...

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor; nothing else is held in memory."""
        ...


@dataclass(frozen=True)
class Policy:
    """What an export is made of."""

    weights: Weights
    model_files: Path
    """Folder of its config and tokenizer."""


def open_policy(checkpoint: Path) -> Policy:
    """The policy of a verified checkpoint, or of verl's `global_step_N` or its `actor/`.

    Raises:
        CheckpointError: it has no weights that can be read, or no config.
    """
    actor = _verl_actor(checkpoint)
    # Older releases of verl write the model's files beside the ranks'.
    files = [actor / "huggingface", actor] if actor else [checkpoint / layout.TOKENIZER_DIR]
    folder = next((path for path in files if (path / "config.json").is_file()), None)
    if folder is None:
        raise CheckpointError(
            f"{checkpoint} has no {files[0].relative_to(checkpoint)}/config.json, so its model is unknown.",
            f"Put the model's configuration and tokenizer into {files[0]}.",
        )
    return Policy(RoleWeights(read_role(checkpoint, ACTOR)) if actor is None else RankFiles(actor), folder)


class RoleWeights:
    """The policy of layout `full` or `sharded`, as float32."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._shapes = source.shapes()

    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        whole = torch.empty(self._shapes[name], dtype=torch.float32)
        self._source.fill({name: whole}, 0, 1)
        return whole


class Held:
    """Tensors in memory, as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class RankFiles:
    """`model_world_size_W_rank_R.pt` of every rank: DTensors, whose parts stay on disk until they are read."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: a file holds what is no sharded tensor.
        """
        self._ranks = [_load(path) for path in _rank_files(folder)]

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(value.shape) for name, value in self._ranks[0].items()}

    def read(self, name: str) -> torch.Tensor:
        parts = [rank[name] for rank in self._ranks]
        if not isinstance(parts[0], DTensor):
            # Held whole by every rank.
            return parts[0].detach()
        whole = _joined(parts, name)
        if whole.shape != parts[0].shape:
            raise CheckpointError(f"{name}: the ranks' parts make {list(whole.shape)}, not {list(parts[0].shape)}.")
        return whole


def _verl_actor(checkpoint: Path) -> Path | None:
    """The folder of the policy's rank files; None: this is no checkpoint of verl's FSDP trainers."""
    return next((folder for folder in (checkpoint / "actor", checkpoint) if _rank_files(folder)), None)


def _rank_files(folder: Path) -> list[Path]:
    """In the order of ranks. How many there must be was verified, by what their names say."""
    found = [(int(match[2]), path) for path in folder.glob("*.pt") if (match := _RANK_FILE.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _load(path: Path) -> dict[str, torch.Tensor]:
    """One rank's tensors, memory-mapped. Verification let through what is in verl's files; code is refused here too."""
    mesh_log = logging.getLogger("torch.distributed.device_mesh")
    level = mesh_log.level
    # It warns that there is no process group, which is meant.
    mesh_log.setLevel(logging.ERROR)
    try:
        with torch.serialization.safe_globals(_dtensor_globals()):
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {first_line(error)}", "Only sharded tensors (DTensor) are understood."
        ) from error
    finally:
        mesh_log.setLevel(level)
    bad = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if bad:
        raise CheckpointError(f"{path}: {bad[0]} is {type(found[bad[0]]).__name__}, expected a tensor.")
    return found


def _dtensor_globals() -> list[Any]:
    """Classes of a pickled DTensor, also under the names of earlier releases of torch."""
    from torch.distributed import _mesh_layout, device_mesh
    from torch.distributed.tensor import _dtensor_spec, placement_types

    specs = [DTensor, device_mesh.DeviceMesh, _mesh_layout._MeshLayout]
    specs += [getattr(_dtensor_spec, name) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")]
    specs += [getattr(placement_types, name) for name in ("Shard", "Replicate", "Partial", "_StridedShard")]
    earlier: list[Any] = [(DTensor, "torch.distributed._tensor.api.DTensor")]
    earlier += [(one, f"torch.distributed._tensor.placement_types.{one.__name__}") for one in (Shard, Replicate)]
    return [*specs, *earlier]


def _joined(parts: Sequence[Any], name: str) -> torch.Tensor:
    """The whole of one tensor: the parts of those ranks that hold different ones, in order."""
    placements, mesh = parts[0].placements, parts[0].device_mesh.mesh
    sharded = [dim for dim, placement in enumerate(placements) if type(placement) is Shard]
    understood = all(type(placement) in (Shard, Replicate) for placement in placements)
    if not understood or len(sharded) > 1 or any(isinstance(placement, Partial) for placement in placements):
        raise CheckpointError(
            f"{name} is placed as {placements}, which is not understood.",
            "Have verl's own merger write a Hugging Face folder: python -m verl.model_merger merge …",
        )
    # Replicas hold the same: of every other dimension of the mesh the first row.
    index = tuple(slice(None) if dim in sharded else 0 for dim in range(mesh.ndim))
    holders = mesh[index].reshape(-1).tolist()
    local = [parts[rank].to_local().detach() for rank in holders]
    return torch.cat(local, dim=placements[sharded[0]].dim) if sharded else local[0]
