"""Cutting rows into micro-batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from keepstep.actor.batch import pack
from keepstep.actor.layout import Costs, Layout, lay_out
from keepstep.actor.micro_batches import by_count, by_tokens, split_to


def test_by_count_keeps_the_order():
    assert by_count([4, 2, 7, 1, 0], 2) == [[4, 2], [7, 1], [0]]


def costs_of(lengths: list[int], layout: Layout, prompt: int = 0, groups: list[int] | None = None) -> Costs:
    return Costs(layout, lengths, [prompt] * len(lengths), groups or list(range(len(lengths))))


@pytest.mark.parametrize("layout", ["padded", "packed", "grouped"])
def test_by_tokens_keeps_every_row_once_and_within_the_budget(layout: Layout):
    draw = random.Random(7)
    for _ in range(200):
        lengths = [draw.randint(5, 40) for _ in range(draw.randint(1, 30))]
        groups = [draw.randint(0, 5) for _ in lengths] if layout == "grouped" else None
        rows = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
        parts = by_tokens(rows, costs_of(lengths, layout, 5, groups), 50)
        assert sorted(row for part in parts for row in part) == sorted(rows)
        for part in parts:
            own = [lengths[row] for row in part]
            cost = {"padded": max(own) * len(own), "packed": sum(own)}
            if groups:
                cost["grouped"] = 5 * len({groups[row] for row in part}) + sum(length - 5 for length in own)
            assert cost[layout] <= 50


def test_a_padded_row_takes_as_much_as_the_longest_beside_it():
    lengths = [10, 2, 2, 2, 2]
    assert by_tokens(range(5), costs_of(lengths, "packed"), 18) == [[0, 1, 2, 3, 4]]
    assert by_tokens(range(5), costs_of(lengths, "padded"), 18) == [[0], [1, 2, 3, 4]]


def test_rows_of_one_prompt_stay_together_where_the_budget_holds_them():
    costs = costs_of([12, 11, 13, 11, 12, 11], "grouped", 10, [0, 1, 0, 1, 0, 1])
    assert costs([0, 2, 4]) == 10 + 2 + 3 + 2
    assert by_tokens(range(6), costs, 20) == [[0, 2, 4], [1, 3, 5]]
    assert by_tokens(range(6), costs, 30) == [[0, 2, 4, 1, 3, 5]]
    assert by_tokens(range(6), costs, 15) == [[0, 2], [1, 3, 5], [4]], "a group that is too much is cut"


def test_a_row_over_the_budget_stands_alone():
    assert by_tokens([0, 1], costs_of([90, 5], "packed"), 50) == [[0], [1]]


def test_split_to_makes_as_many_parts_as_the_other_ranks_have():
    parts = [[0, 1, 2, 3], [4]]
    found = split_to(parts, costs_of([9, 9, 1, 1, 50], "packed"), 4)
    assert found == [[0], [4], [2, 3], [1]]
    assert parts == [[0, 1, 2, 3], [4]], "its argument stays as it was"
    assert split_to(parts, costs_of([1] * 5, "packed"), 2) == parts


def test_prompts_stand_once_and_everything_keeps_its_place():
    batch = pack([[1, 2], [3], [1, 2]], [[4, 5], [6], [7]], [[0.0, 0.0], [0.0], [0.0]], pad_id=9)
    found = lay_out(batch, "grouped")
    assert found.tokens.tolist() == [1, 2, 4, 5, 7, 3, 6]
    assert found.positions.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert found.places.tolist() == [[0, 1, 2, 3], [5, 6, 0, 0], [0, 1, 4, 0]]
    # Of [3, 4] places, counted through: a token that rows share is taken from the last of them.
    assert found.owners.tolist() == [8, 9, 2, 3, 10, 4, 5]
    apart = lay_out(batch, "packed")
    assert apart.tokens.tolist() == [1, 2, 4, 5, 3, 6, 1, 2, 7]
    assert apart.owners.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]


def test_trimmed_cuts_padding_and_nothing_else():
    batch = pack([[1, 2], [3]], [[4, 5, 6], []], [[-1.0, -2.0, -3.0], []], pad_id=9)
    part = batch.rows([1]).trimmed()
    # One column to predict stays, though nothing in it counts.
    assert part.tokens.tolist() == [[3, 9]] and part.mask.tolist() == [[0.0]] and part.lengths.tolist() == [1]
    whole = batch.rows([0, 1]).trimmed()
    assert all(np.array_equal(getattr(whole, name), getattr(batch, name)) for name in vars(batch))
