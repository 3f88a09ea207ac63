"""Do the shards of all ranks make whole tensors? Pure functions over safetensors headers.

FSDP2 cuts along dimension 0 in the manner of `torch.chunk`: rank r of W holds rows [r·c, (r+1)·c) of n, c = ⌈n/W⌉, and
later ranks may hold nothing, and write that down too. How many ranks there were is what the checkpoint itself says.
"""

from __future__ import annotations

import re

from keepstep.checkpoint.safetensors_headers import Shard

Shards = dict[str, dict[str, Shard]]
"""Tensors by name, of each file by its path."""

Shapes = dict[str, tuple[int, ...]]
"""Full shapes of tensors by name."""

_RANK = re.compile(r"shard-(\d+)-model")
_STATE = "state."
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq")


def rank_of(path: str) -> int:
    """The rank that wrote a shard file; files count from 1."""
    match = _RANK.search(path)
    assert match is not None, "only files with a shard's name get here"
    return int(match.group(1)) - 1


def cover_problems(shards: Shards, world_size: int | None) -> tuple[Shapes, list[str]]:
    """(full shapes by name, what is wrong) of the shards in one folder.

    Args:
        world_size: ranks that wrote them; None: another number may have, as for a reference that is only linked.
    """
    beyond = [path for path in shards if world_size is not None and not 0 <= rank_of(path) < world_size]
    problems = [f"{path}: a shard of rank {rank_of(path)}, the checkpoint is of {world_size} ranks" for path in beyond]
    parts: dict[str, list[tuple[str, Shard]]] = {}
    for path, tensors in sorted(shards.items()):
        for name, shard in tensors.items():
            parts.setdefault(name, []).append((path, shard))
    shapes: Shapes = {}
    for name, found in parts.items():
        reason = _problem(name, found, world_size)
        if reason:
            problems.append(reason)
        else:
            rows = sum(shard.shape[0] for _, shard in found if shard.shape)
            shapes[name] = (rows, *found[0][1].shape[1:]) if found[0][1].shape else ()
    return shapes, problems


def optimizer_problems(model: Shapes, optimizer: Shapes) -> list[str]:
    """Whether the optimizer's full tensors are those of the model's parameters. A frozen parameter has none."""
    problems = []
    for name, shape in optimizer.items():
        parameter, _, key = name.removeprefix(_STATE).rpartition(".")
        if not name.startswith(_STATE) or parameter not in model:
            problems.append(f"tensor {name} is of no parameter of the model")
        elif key in _LIKE_PARAMETER and shape != model[parameter]:
            problems.append(f"tensor {name} has the shape {list(shape)}, its parameter {list(model[parameter])}")
        elif key in _LIKE_PARAMETER and f"{_STATE}{parameter}.step" not in optimizer:
            problems.append(f"tensor {name} has no counter of updates beside it")
    return problems


def reference_problems(model: Shapes, reference: Shapes) -> list[str]:
    """Whether the reference is a model of the policy's form."""
    names = sorted(name for name in model.keys() | reference.keys() if model.get(name) != reference.get(name))
    return [f"tensor {name} is {reference.get(name)}, the policy's {model.get(name)}" for name in names[:1]]


def _problem(name: str, found: list[tuple[str, Shard]], world_size: int | None) -> str:
    """Why the parts of one tensor are not the whole of it; empty when they are."""
    path, first = found[0]
    for other, shard in found[1:]:
        if (shard.dtype, shard.shape[1:], len(shard.shape)) != (first.dtype, first.shape[1:], len(first.shape)):
            return f"{other}: tensor {name} is {shard.dtype} {list(shard.shape)}, unlike its part in {path}"
    if not first.shape:
        return "" if len(found) == 1 else f"{found[1][0]}: number {name} stands in {path} already"
    if world_size is not None and len(found) != world_size:
        ranks = {rank_of(other) for other, _ in found}
        absent = next(rank for rank in range(world_size) if rank not in ranks)
        return f"{path}: tensor {name} has {len(found)} parts of {world_size} ranks, none of rank {absent}"
    num_rows = sum(shard.shape[0] for _, shard in found)
    chunk = -(-num_rows // world_size) if world_size else 0
    end = 0
    for path, shard in sorted(found, key=lambda part: (part[1].begins[0], part[1].shape[0])):
        begin = min(rank_of(path) * chunk, num_rows) if world_size else end
        end = min(begin + (chunk if world_size else shard.shape[0]), num_rows)
        if any(shard.begins[1:]):
            return f"{path}: tensor {name} is cut along another dimension than the first"
        if (shard.begins[0], shard.shape[0]) != (begin, end - begin):
            last = shard.begins[0] + shard.shape[0]
            of = f" on {world_size} ranks" if world_size else ""
            return (
                f"{path}: tensor {name} holds rows [{shard.begins[0]}, {last}), "
                f"expected [{begin}, {end}) of {num_rows}{of}"
            )
    return ""
