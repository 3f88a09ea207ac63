"""A small valid checkpoint of layout `sharded`: shards by torch's own writer on one gloo rank each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.digest import digest_file
from keepstep.run import RunDir
from tests.unit import builder

SHAPES = {"embed.weight": (5, 3), "layer.weight": (4, 3), "norm.weight": (1,)}
"""Five rows do not divide by two, and of one row the second rank holds nothing."""


def write(folder: Path, step: int, world_size: int = 2) -> Path:
    """Write `folder`/step_<step> with a manifest; everything but the tensors comes from the `full` writer."""
    run = RunDir.at(folder.parent / f"{folder.name}-full")
    builder.write(run, step)
    target = folder / f"step_{step}"
    shutil.copytree(run.checkpoint(step), target)
    for name in (layout.ACTOR, layout.OPTIMIZER, layout.REF, layout.MANIFEST):
        (target / name).unlink()
    (target / layout.PARAM_GROUPS).write_text(json.dumps([{"lr": 1e-3, "betas": [0.9, 0.999], "params": list(SHAPES)}]))
    mp.spawn(_write_shards, (world_size, str(target), str(folder / "rendezvous")), world_size)
    seal(target, step, world_size)
    return target


def seal(target: Path, step: int, world_size: int, run_id: str = "run-a") -> None:
    """A manifest that fits what lies in the folder."""
    (target / layout.MANIFEST).unlink(missing_ok=True)
    names = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    shards = [name for name in names if layout.shard_dir(name)]
    needed = [layout.SCHEDULER, layout.PARAM_GROUPS, layout.TRAINER_STATE]
    tensors: dict[str, list[list[Any]]] = {name: _describe(target / name) for name in shards}
    data = manifest.build(
        run_id=run_id, attempt=1, step=step, world_size=world_size, kind=layout.SHARDED,
        required=[*(name for name in needed if name in names), *shards],
        files={name: digest_file(target / name) for name in names},
        tensors=tensors | {layout.SCHEDULER: []}, metrics={}, nonfinite={},
    )  # fmt: skip
    (target / layout.MANIFEST).write_bytes(data)


def _describe(path: Path) -> list[list[Any]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]


def _write_shards(rank: int, world_size: int, target: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(7)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    optimizer = {f"state.{name}.{key}": value * 2 for name, value in model.items() for key in ("exp_avg", "exp_avg_sq")}
    for role, tensors in {"actor/model": model, "actor/optimizer": optimizer, "ref/model": model}.items():
        state: dict[str, Any] = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}
        if role == "actor/optimizer":
            state |= {f"state.{name}.step": torch.tensor(3.0) for name in model}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{target}/{role}", save_distributed=True))
    dist.destroy_process_group()
