"""Advantages against values worked out by hand and by plain loops in float64."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.algorithm import advantages
from keepstep.algorithm.advantages import grpo_advantages
from tests.unit import by_loops

ESTIMATORS = ["grpo", "dr_grpo", "rloo", "grpo_passk"]


def test_group_of_four_by_hand():
    # Mean 0.5; unbiased variance (4 * 0.5^2) / 3 = 1/3; deviation 1/sqrt(3); advantages +-0.5 * sqrt(3).
    found = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64), epsilon=0.0)
    expected = 0.5 * math.sqrt(3)
    torch.testing.assert_close(found, torch.tensor([[expected, -expected, -expected, expected]], dtype=torch.float64))


def test_groups_do_not_see_each_other():
    found = grpo_advantages(torch.tensor([[2.0, 4.0], [100.0, 300.0]], dtype=torch.float64), epsilon=0.0)
    # Deviations sqrt(2) and 100*sqrt(2): both groups are (-1, 1) / sqrt(2).
    expected = 1 / math.sqrt(2)
    torch.testing.assert_close(found, torch.tensor([[-expected, expected]] * 2, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.7, 0.1, -1e9, 1e-9])
def test_equal_rewards_give_exactly_zero(estimator: str, reward: float):
    """The mean of eight times 0.7 in float32 is not 0.7; the advantage is zero all the same."""
    for group_size in (2, 3, 8, 100):
        assert advantages.estimate_advantages(torch.full((3, group_size), reward), estimator).abs().max() == 0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_single_response_has_no_advantage(estimator: str):
    assert advantages.estimate_advantages(torch.tensor([[5.0]]), estimator).tolist() == [[0.0]]


def test_without_std_it_is_only_centred():
    found = grpo_advantages(torch.tensor([[3.0, 1.0, 2.0]]), normalize_by_std=False)
    assert found.tolist() == [[1.0, -1.0, 0.0]]


def test_epsilon_is_added_to_the_deviation():
    found = grpo_advantages(torch.tensor([[0.0, 2.0]], dtype=torch.float64), epsilon=1.0)
    expected = 1 / (math.sqrt(2) + 1)
    torch.testing.assert_close(found, torch.tensor([[-expected, expected]], dtype=torch.float64))


def random_groups(seed: int, num_groups: int, group_size: int) -> list[list[float]]:
    return by_loops.random_rows(random.Random(seed), [group_size] * num_groups, -2.0, 3.0)


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_estimators_against_loops(group_size: int):
    groups = random_groups(1, 5, group_size)
    rewards = torch.tensor(groups, dtype=torch.float64)
    expected = {
        ("grpo", True): [by_loops.grpo(group, True, 1e-6) for group in groups],
        ("grpo", False): [by_loops.grpo(group, False, 0.0) for group in groups],
        ("dr_grpo", True): [by_loops.grpo(group, False, 0.0) for group in groups],
        ("rloo", True): [by_loops.rloo(group) for group in groups],
    }
    for (estimator, normalize), values in expected.items():
        found = advantages.estimate_advantages(rewards, estimator, normalize_by_std=normalize)
        torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_rloo_by_hand():
    # 4 - (1 + 1) / 2 = 3; 1 - (4 + 1) / 2 = -1.5.
    assert advantages.rloo_advantages(torch.tensor([[4.0, 1.0, 1.0]])).tolist() == [[3.0, -1.5, -1.5]]


def test_only_the_best_of_a_group_counts_in_passk():
    rewards = torch.tensor([[1.0, 4.0, 2.5], [2.0, 0.0, 2.0]], dtype=torch.float64)
    found = advantages.passk_advantages(rewards, normalize_by_std=False)
    assert found.tolist() == [[0.0, 1.5, 0.0], [0.0, 0.0, 0.0]]
    # Mean 2.5, unbiased variance (1.5^2 + 1.5^2) / 2 = 2.25, deviation 1.5.
    divided = advantages.passk_advantages(rewards, epsilon=0.5)
    assert divided[0].tolist() == [0.0, 0.75, 0.0]


def test_groups_with_a_signal():
    """Dropped by dynamic sampling: all equal, whatever the value, and groups of one."""
    rewards = torch.tensor([[0.7, 0.7, 0.7], [0.0, 0.0, 1e-9], [1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]])
    assert advantages.has_signal(rewards).tolist() == [False, True, False, True]
    assert advantages.has_signal(torch.tensor([[3.0]])).tolist() == [False]


@given(
    groups=st.integers(2, 6).flatmap(
        lambda size: st.lists(st.lists(st.floats(-10, 10), min_size=size, max_size=size), min_size=1, max_size=5)
    ),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    data=st.data(),
)
@settings(deadline=None)
def test_order_does_not_matter_and_groups_sum_to_zero(groups: list[list[float]], estimator: str, data: st.DataObject):
    """Permuting prompts, and responses within a group, permutes the advantages; each group's sum is zero."""
    rewards = torch.tensor(groups, dtype=torch.float64)
    found = advantages.estimate_advantages(rewards, estimator)
    prompts = data.draw(st.permutations(range(rewards.shape[0])))
    members = data.draw(st.permutations(range(rewards.shape[1])))
    moved = advantages.estimate_advantages(rewards[prompts][:, members], estimator)
    torch.testing.assert_close(moved, found[prompts][:, members], rtol=1e-7, atol=1e-7)
    assert found.sum(1).abs().max() < 1e-6


@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8))
@settings(deadline=None)
def test_a_group_is_dropped_exactly_when_it_teaches_nothing(rewards: list[float]):
    group = torch.tensor([rewards])
    assert bool(advantages.has_signal(group)) == bool((advantages.estimate_advantages(group, "grpo") != 0).any())
