"""Cutting rows into micro-batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from keepstep.actor.batch import pack
from keepstep.actor.micro_batches import by_count, by_tokens, split_to


def test_by_count_keeps_the_order():
    assert by_count([4, 2, 7, 1, 0], 2) == [[4, 2], [7, 1], [0]]


@pytest.mark.parametrize("packed", [False, True])
def test_by_tokens_keeps_every_row_once_and_within_the_budget(packed: bool):
    draw = random.Random(7)
    for _ in range(200):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
        rows = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
        parts = by_tokens(rows, lengths, 50, packed=packed)
        assert sorted(row for part in parts for row in part) == sorted(rows)
        for part in parts:
            own = [lengths[row] for row in part]
            assert (sum(own) if packed else max(own) * len(own)) <= 50


def test_a_padded_row_takes_as_much_as_the_longest_beside_it():
    lengths = [10, 2, 2, 2, 2]
    assert by_tokens(range(5), lengths, 18, packed=True) == [[0, 1, 2, 3, 4]]
    assert by_tokens(range(5), lengths, 18, packed=False) == [[0], [1, 2, 3, 4]]


def test_a_row_over_the_budget_stands_alone():
    assert by_tokens([0, 1], [90, 5], 50, packed=True) == [[0], [1]]


def test_split_to_makes_as_many_parts_as_the_other_ranks_have():
    parts = [[0, 1, 2, 3], [4]]
    found = split_to(parts, [9, 9, 1, 1, 50], 4)
    assert found == [[0], [4], [2, 3], [1]]
    assert parts == [[0, 1, 2, 3], [4]], "its argument stays as it was"
    assert split_to(parts, [1] * 5, 2) == parts


def test_trimmed_cuts_padding_and_nothing_else():
    batch = pack([[1, 2], [3]], [[4, 5, 6], []], [[-1.0, -2.0, -3.0], []], pad_id=9)
    part = batch.rows([1]).trimmed()
    # One column to predict stays, though nothing in it counts.
    assert part.tokens.tolist() == [[3, 9]] and part.mask.tolist() == [[0.0]] and part.lengths.tolist() == [1]
    whole = batch.rows([0, 1]).trimmed()
    assert all(np.array_equal(getattr(whole, name), getattr(batch, name)) for name in vars(batch))
