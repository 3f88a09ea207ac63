"""What k of n tries would bring."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from keepstep.algorithm.best_of import best_of_k, tries


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_k_is_the_mean_over_all_draws(k: int):
    rewards = np.random.default_rng(3).normal(size=(4, 5))
    by_hand = np.mean([max(draw) for row in rewards for draw in itertools.combinations(row, k)])
    assert best_of_k(rewards, k) == pytest.approx(by_hand, rel=1e-12)


def test_of_right_and_wrong_it_is_pass_at_k():
    """arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k), here with n = 4, c = 1, k = 2."""
    assert best_of_k(np.array([[0.0, 1.0, 0.0, 0.0]]), 2) == pytest.approx(1 - 3 / 6)
    assert best_of_k(np.zeros((2, 4)), 4) == 0.0


@pytest.mark.parametrize(("n", "expected"), [(1, []), (2, [2]), (5, [2, 4, 5]), (8, [2, 4, 8])])
def test_tries(n: int, expected: list[int]):
    assert tries(n) == expected
