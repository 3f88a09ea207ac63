"""A small valid checkpoint by the real writer, from made-up shards of two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.actor.rng import rng_states
from keepstep.actor.shards import RankSnapshot, ReferenceSnapshot
from keepstep.checkpoint.writer import save
from keepstep.checkpoint.written import SaveRequest, SaveResult
from keepstep.run import RunDir, write_json

SHAPES = {"embed.weight": (5, 3), "layer.weight": (4, 3), "norm.weight": (3,)}


def snapshots(seed: int, world_size: int = 2) -> list[RankSnapshot]:
    """Shards as FSDP2 cuts them: chunks along dimension 0, the last ranks may hold less."""
    generator = np.random.default_rng(seed)
    full = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    found = []
    for rank in range(world_size):
        params = {name: _chunk(value, rank, world_size) for name, value in full.items()}
        optimizer = {
            name: {"step": np.array(3.0, dtype=np.float32), "exp_avg": value * 2, "exp_avg_sq": value * value}
            for name, value in params.items()
        }
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(SHAPES)}]
        found.append(RankSnapshot(rank, params, dict(SHAPES), optimizer, groups, {"last_epoch": 3}, rng_states()))
    return found


def references() -> list[ReferenceSnapshot]:
    return [ReferenceSnapshot(snapshot.params, snapshot.shapes) for snapshot in snapshots(0)]


def request(run: RunDir, step: int, **changes: Any) -> SaveRequest:
    model_files = run.root / "model"
    model_files.mkdir(parents=True, exist_ok=True)
    (model_files / "config.json").write_text("{}")
    values: dict[str, Any] = {
        "run_root": str(run.root),
        "run_id": "run-a",
        "attempt": 1,
        "step": step,
        "world_size": 2,
        "has_reference": True,
        "reference_step": None,
        "trainer_state": {
            "global_step": step,
            "epoch": 1,
            "dataloader_state": {"train_dataset_offset": step * 4, "val_dataset_offset": 0},
            "num_updates": 3,
            "num_response_tokens": step * 32,
            "metrics": {"critic/rewards/mean": 0.5},
        },
        "config_yaml": "a: 1\n",
        "model_files": str(model_files),
        "engine_state": {"weight_version": step},
    }
    return SaveRequest(**(values | changes))


def write(run: RunDir, step: int, seed: int | None = None, **changes: Any) -> SaveResult:
    """Save one step; `seed` decides the tensors."""
    random.seed(0)
    if not run.has_record():
        write_json(run.record, {"run_id": "run-a"})
    shards = snapshots(step if seed is None else seed)
    reference = None if changes.get("reference_step") else references()
    return save(request(run, step, **changes), shards, reference)


def run_in(folder: Path) -> RunDir:
    return RunDir.at(folder / "run")


def _chunk(value: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    size = -(-len(value) // world_size)
    return value[rank * size : (rank + 1) * size].copy()
