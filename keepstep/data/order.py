"""The order of rows and the seeds of samples: pure functions of counters, so there is no iterator state to lose."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from keepstep.data.offset import epoch_of


@lru_cache(maxsize=4)
def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Order of the rows in an epoch: a function of (seed, epoch) alone. [num_rows] int64, read-only."""
    order = _generator("order", seed, epoch).permutation(num_rows)
    order.setflags(write=False)
    return order


def rows_at(offset: int, count: int, *, num_rows: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of the `count` rows after `offset`, across ends of epochs; neither need divide the other."""
    indices = []
    for position in range(offset, offset + count):
        index = position % num_rows
        indices.append(int(permutation(num_rows, seed, epoch_of(position, num_rows))[index]) if shuffle else index)
    return indices


def subset(num_rows: int, cap: int, *, seed: int, split: str, shuffle: bool) -> list[int]:
    """Indices of the rows that a cap leaves, in their order: drawn by (seed, split), or the first ones.

    Args:
        cap: rows at most; -1: all of them.
        split: "train" or "val", so that the two are drawn apart.
    """
    if cap < 0 or cap >= num_rows:
        return list(range(num_rows))
    if not shuffle:
        return list(range(cap))
    return sorted(int(index) for index in _generator("subset", seed, split).permutation(num_rows)[:cap])


def sample_seed(seed: int, step: int, prompt: int, sample: int) -> int:
    """63-bit seed of one response. Hashed, because equal or neighbouring seeds may give equal samples."""
    return int.from_bytes(_digest("sample", seed, step, prompt, sample)[:8], "big") >> 1


def _generator(*parts: object) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(*parts)[:16], "big")))


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
