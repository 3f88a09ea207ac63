"""Full tensors on rank 0 from the shards of all ranks, many tensors in one collective.

A collective for each tensor costs a small model more than its bytes, and an all-gather brings all ranks what one needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from keepstep.actor.shards import local, own_rows

BUCKET_ELEMENTS = 2**24
"""Of the full tensors that are gathered at once, or one tensor: 64 MiB in float32."""


def gathered(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) in order on rank 0, nothing elsewhere; a collective that every rank has to exhaust.

    Args:
        tensors: sharded along dimension 0 in the manner of `torch.chunk`, of one dtype; equal names on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for names in buckets({name: tensor.numel() for name, tensor in tensors.items()}, BUCKET_ELEMENTS):
        shapes = [tensors[name].shape for name in names]
        own = torch.cat([local(tensors[name]).flatten() for name in names])
        # Rank 0 has the largest share of each tensor, so of all.
        size = sum(num_elements(shape, 0, world_size) for shape in shapes)
        own = torch.nn.functional.pad(own, (0, size - own.numel()))
        parts = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 else None
        dist.gather(own, parts)
        if parts is not None:
            yield from zip(names, apart(parts, shapes), strict=True)


def apart(parts: list[torch.Tensor], shapes: list[torch.Size]) -> Iterator[torch.Tensor]:
    """The full tensors from what each rank sent: its shards behind each other."""
    begins = [0] * len(parts)
    for shape in shapes:
        shards = []
        for rank, part in enumerate(parts):
            end = begins[rank] + num_elements(shape, rank, len(parts))
            shards.append(part[begins[rank] : end])
            begins[rank] = end
        yield torch.cat(shards).view(shape)


def num_elements(shape: torch.Size, rank: int, world_size: int) -> int:
    """Of this rank's chunk along dimension 0."""
    rows = own_rows(shape[0], rank, world_size)
    return (rows.stop - rows.start) * shape[1:].numel()


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """On the host. numpy knows no bfloat16: its bits are there as uint16."""
    found: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    return found


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of what `as_array` made."""
    found = torch.tensor(array)
    return found.view(torch.bfloat16) if found.dtype == torch.uint16 else found


def buckets(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Names in order, cut where the next size would exceed `most`; one above it stands alone."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
