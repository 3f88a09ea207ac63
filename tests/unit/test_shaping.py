"""What is done to rewards and masks before the advantages, by hand."""

import math

import pytest
import torch

from keepstep.algorithm import shaping


def test_overlong_penalty_by_hand():
    """Limit 100, buffer 20: nothing up to 80, a quarter at 85, all at 100, and no more than that beyond."""
    lengths = torch.tensor([0, 80, 81, 85, 90, 100, 120])
    found = shaping.overlong_penalty(lengths, max_length=100, buffer_length=20)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, -0.05, -0.25, -0.5, -1.0, -1.0]))
    halved = shaping.overlong_penalty(lengths, max_length=100, buffer_length=20, factor=0.5)
    torch.testing.assert_close(halved, found / 2)


def test_truncated_responses_lose_their_tokens():
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    found = shaping.mask_truncated(mask, torch.tensor([False, True, False]))
    assert found.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert mask[1].tolist() == [1.0, 1.0, 1.0], "the mask that was given stays"


@pytest.mark.parametrize("junk", [5.0, math.nan, math.inf])
def test_kl_in_reward_sums_the_response(junk: float):
    """3 - 0.1 * (1 + 2); one without a token keeps its reward; padding does not count."""
    kl = torch.tensor([[1.0, 2.0, junk], [junk, junk, junk]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = shaping.kl_in_reward(torch.tensor([3.0, 1.0], dtype=torch.float64), kl, mask, 0.1)
    torch.testing.assert_close(found, torch.tensor([2.7, 1.0], dtype=torch.float64))
