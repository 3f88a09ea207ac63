"""Advantages against values worked out by hand."""

import math

import torch

from keepstep.algorithm.advantages import grpo_advantages


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


def test_equal_rewards_give_zero_not_nan():
    assert grpo_advantages(torch.full((3, 8), 0.7)).abs().max() == 0


def test_single_response_has_no_advantage():
    assert grpo_advantages(torch.tensor([[5.0]])).tolist() == [[0.0]]


def test_without_std_it_is_only_centred():
    found = grpo_advantages(torch.tensor([[3.0, 1.0, 2.0]]), normalize_by_std=False)
    assert found.tolist() == [[1.0, -1.0, 0.0]]


def test_epsilon_is_added_to_the_deviation():
    found = grpo_advantages(torch.tensor([[0.0, 2.0]], dtype=torch.float64), epsilon=1.0)
    expected = 1 / (math.sqrt(2) + 1)
    torch.testing.assert_close(found, torch.tensor([[-expected, expected]], dtype=torch.float64))
