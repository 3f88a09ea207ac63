"""Row order and sample seeds are functions of counters alone."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from keepstep.data.order import epoch_of, permutation, rows_at, sample_seed, subset


def test_next_row_when_the_batch_does_not_divide_the_rows():
    """C7: 1,000 rows, batch 128, after 8 steps: row 24 of epoch 2."""
    offset = 8 * 128
    assert epoch_of(offset, 1000) == 2
    assert rows_at(offset, 3, num_rows=1000, seed=1, shuffle=False) == [24, 25, 26]
    second = permutation(1000, 1, 2)
    assert rows_at(offset, 3, num_rows=1000, seed=1, shuffle=True) == [int(row) for row in second[24:27]]


@pytest.mark.parametrize("num_rows,batch", [(10, 5), (10, 4), (7, 16), (3, 3), (1, 2)])
def test_every_row_once_in_every_epoch(num_rows: int, batch: int):
    """C10: the pass after an epoch's end is whole, whether or not the batch divides the rows."""
    num_epochs = 4
    num_steps = -(-num_epochs * num_rows // batch)
    rows = [row for s in range(num_steps) for row in rows_at(s * batch, batch, num_rows=num_rows, seed=3, shuffle=True)]
    for epoch in range(num_epochs):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@pytest.mark.parametrize("shuffle", [True, False])
def test_stopping_anywhere_changes_nothing(shuffle: bool):
    """C11, C13: resumed twice inside an epoch, and one step before, at and after its end."""
    whole = rows_at(0, 60, num_rows=20, seed=5, shuffle=shuffle)
    for stops in ([6, 16], [16, 20, 24], [19, 20, 21], [40, 59]):
        edges = [0, *stops, 60]
        parts = [rows_at(a, b - a, num_rows=20, seed=5, shuffle=shuffle) for a, b in itertools.pairwise(edges)]
        assert [row for part in parts for row in part] == whole


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(50, seed, epoch)) for seed in (1, 2) for epoch in (1, 2, 3)}
    assert len(orders) == 6
    assert list(permutation(50, 1, 1)) == list(permutation(50, 1, 1))


def test_order_and_seeds_are_the_same_in_every_release():
    """A run may be resumed by a later release: these values must never change."""
    assert [int(row) for row in permutation(8, 42, 1)] == [2, 5, 3, 0, 4, 1, 7, 6]
    assert sample_seed(42, 1, 0, 0) == int.from_bytes(hashlib.sha256(b"sample/42/1/0/0").digest()[:8], "big") // 2


def test_a_cap_draws_by_seed_and_split():
    """C1: never from the operating system's entropy; the two splits and other seeds draw others."""
    drawn = subset(200, 50, seed=42, split="train", shuffle=True)
    assert drawn == sorted(set(drawn)) and len(drawn) == 50 and set(drawn) <= set(range(200))
    assert drawn == subset(200, 50, seed=42, split="train", shuffle=True)
    others = [subset(200, 50, seed=seed, split=split, shuffle=True) for seed, split in ((43, "train"), (42, "val"))]
    assert drawn not in others and others[0] != others[1]
    assert subset(200, 50, seed=42, split="train", shuffle=False) == list(range(50))
    for cap in (-1, 7, 8):
        assert subset(7, cap, seed=42, split="train", shuffle=True) == list(range(7))


def test_every_row_may_be_drawn():
    drawn = {row for seed in range(200) for row in subset(10, 2, seed=seed, split="train", shuffle=True)}
    assert drawn == set(range(10))


def test_a_cap_draws_the_same_in_every_release():
    """A run may be resumed by a later release: these values must never change."""
    seed = int.from_bytes(hashlib.sha256(b"subset/42/train").digest()[:16], "big")
    expected = sorted(np.random.Generator(np.random.PCG64(seed)).permutation(20)[:5])
    assert subset(20, 5, seed=42, split="train", shuffle=True) == expected == [2, 8, 10, 15, 19]


def test_sample_seeds_are_63_bit_and_never_neighbours():
    """Equal seeds give equal samples: all of a run's are different, and none follows another."""
    seeds = [sample_seed(42, s, prompt, sample) for s in range(20) for prompt in range(16) for sample in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    ordered = sorted(seeds)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1
