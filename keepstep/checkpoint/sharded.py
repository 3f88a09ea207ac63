"""Writing layout `sharded`: every rank's own part by torch.distributed.checkpoint, as safetensors. Heavy half.

Safetensors, not torch.distributed.checkpoint's own `.distcp`: its `.metadata` is a pickle that a load executes, while a
safetensors header is JSON, and the offsets of each shard stand in it (`DCP_SHARDING_INFO`).
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from keepstep.actor.shards import RankSnapshot, ReferenceSnapshot, Shapes
from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.written import Written
from keepstep.errors import no_room_cause

Tensors = Mapping[str, torch.Tensor]


def listen(host: str) -> dist.TCPStore:
    """The meeting place of the writers, on a free port: one that is only looked up may be taken before it is used."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


class ShardWriter:
    """One of the writers that save together; they meet in a process group of their own."""

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, timeout_s: float, store: dist.TCPStore | None = None
    ) -> None:
        """
        Args:
            store: what `listen` opened at host:port, for the first of them.
        """
        timeout = datetime.timedelta(seconds=timeout_s)
        store = store or dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        self._mesh = init_device_mesh("cpu", (world_size,))

    def write(self, folder: Path, snapshot: RankSnapshot, reference: ReferenceSnapshot | None) -> Written:
        """Write this rank's shards of every role below `folder`; a collective of all writers."""
        roles: dict[str, Tensors] = {
            layout.ACTOR_SHARDS: self._sharded(snapshot.params, snapshot.shapes),
            layout.OPTIMIZER_SHARDS: self._optimizer(snapshot),
        }
        if reference is not None:
            roles[layout.REF_SHARDS] = self._sharded(reference.params, reference.shapes)
        found = Written()
        for role, tensors in roles.items():
            try:
                _save(folder / role, tensors)
            except CheckpointException as error:
                raise cause_of(error) from error
            found.add(describe(folder, f"{role}/{shard_name(snapshot.rank)}"))
        return found

    def _optimizer(self, snapshot: RankSnapshot) -> Tensors:
        found: dict[str, torch.Tensor] = {}
        for name, state in snapshot.optimizer.items():
            moments = {key: value for key, value in state.items() if key != "step"}
            sharded = self._sharded(moments, dict.fromkeys(moments, snapshot.shapes[name]))
            found |= {f"state.{name}.{key}": value for key, value in sharded.items()}
            found[f"state.{name}.step"] = torch.tensor(state["step"])
        return found

    def _sharded(self, arrays: Mapping[str, np.ndarray], shapes: Shapes) -> Tensors:
        return {name: as_dtensor(array, shapes[name], self._mesh) for name, array in arrays.items()}


def as_dtensor(array: np.ndarray, shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    """A rank's shard as a part of the whole, not copied."""
    own = torch.from_numpy(array)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def write_whole(folder: Path, role_dir: str, tensors: Tensors) -> Written:
    """One role as one shard, by this process alone."""
    _save(folder / role_dir, tensors, no_dist=True)
    return describe(folder, f"{role_dir}/{shard_name(0)}")


def shard_name(rank: int) -> str:
    """torch.distributed.checkpoint's name of a rank's file; it counts from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def cause_of(error: CheckpointException) -> BaseException:
    """What went wrong on the first writer that failed: all of them are told of it."""
    failure, _ = error.failures[min(error.failures)]
    return no_room_cause(failure) or failure


def _save(folder: Path, tensors: Tensors, no_dist: bool = False) -> None:
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with warnings.catch_warnings():
        # It warns that one process alone is meant, which is what `no_dist` says.
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), storage_writer=storage, no_dist=no_dist)


def describe(folder: Path, name: str) -> Written:
    """Digest, tensors and number of non-finite values of a shard file; nothing when this rank held nothing."""
    from safetensors import safe_open

    if not (folder / name).exists():
        return Written()
    infos: list[list[Any]] = []
    num_bad = 0
    with safe_open(folder / name, framework="pt") as file:
        for key in sorted(file.keys()):
            tensor = file.get_tensor(key)
            infos.append([key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
            num_bad += int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
    return Written({name: digest_file(folder / name)}, {name: infos}, {name: num_bad})
