"""Are two runs the same run?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import layout

COUNTERS = ("global_step", "epoch", "dataloader_state", "num_updates", "num_response_tokens", "metrics")


def differences(first: Path, second: Path) -> list[str]:
    """What differs between two checkpoints: every tensor of actor/ and ref/ to the byte, the counters, the metrics."""
    found = []
    # Without a reference, or with adapters, there is no ref/ in either.
    for name in (name for name in layout.TENSOR_FILES if (first / name).exists() or (second / name).exists()):
        mine, other = (torch.load(folder / name, weights_only=True) for folder in (first, second))
        found += [f"{name}: {difference}" for difference in _compare(mine, other, "")]
    mine, other = (json.loads((folder / layout.TRAINER_STATE).read_text()) for folder in (first, second))
    found += [f"trainer_state.{key}: {mine[key]} != {other[key]}" for key in COUNTERS if mine[key] != other[key]]
    return found


def num_tensors(folder: Path) -> int:
    """How many tensors `differences` looks at in one checkpoint."""
    return sum(_count(torch.load(folder / name, weights_only=True)) for name in layout.TENSOR_FILES)


def _compare(first: Any, second: Any, where: str) -> list[str]:
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        # Bytes, not values: 0.0 and -0.0 are equal values, and NaN is not even equal to itself.
        same = (
            same and first.contiguous().view(-1).view(torch.uint8).equal(second.contiguous().view(-1).view(torch.uint8))
            if first.ndim
            else same and first.equal(second)
        )
        return [] if same else [where]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{where}: keys {first.keys() ^ second.keys()}"]
        return [d for key in first for d in _compare(first[key], second[key], f"{where}.{key}")]
    if isinstance(first, list):
        if len(first) != len(second):
            return [f"{where}: {len(first)} != {len(second)} entries"]
        return [d for i, (a, b) in enumerate(zip(first, second, strict=True)) for d in _compare(a, b, f"{where}[{i}]")]
    return [] if first == second else [f"{where}: {first!r} != {second!r}"]


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    return sum(_count(entry) for entry in value.values()) if isinstance(value, dict) else 0
