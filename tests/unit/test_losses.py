"""Losses against values worked out by hand from the published formulas."""

import math

import torch

from keepstep.algorithm import losses


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([[math.log(value) for value in values]], dtype=torch.float64)


def test_token_log_probs_of_known_odds():
    # Odds 1:2:5 are probabilities 1/8, 2/8, 5/8.
    logits = logs(1, 2, 5).unsqueeze(1)
    found = losses.token_log_probs(logits, torch.tensor([[2]]))
    assert math.isclose(found.item(), math.log(5 / 8), rel_tol=1e-6)


def test_temperature_flattens():
    # At temperature 2 odds 1:4 become 1:2.
    found = losses.token_log_probs(logs(1, 4).unsqueeze(1), torch.tensor([[0]]), temperature=2.0)
    assert math.isclose(found.item(), math.log(1 / 3), rel_tol=1e-6)


def test_entropy_of_a_uniform_choice():
    assert math.isclose(losses.entropy(torch.zeros(1, 1, 4)).item(), math.log(4), rel_tol=1e-6)


def test_clip_binds_only_where_it_takes_away():
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages +1, -1, +1, -1 and eps 0.2:
    # min(1.5, 1.2), min(-1.5, -1.2), min(0.5, 0.8), min(-0.5, -0.8), negated.
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    old = logs(0.2, 0.2, 0.2, 0.2)
    new = logs(0.3, 0.3, 0.1, 0.1)
    found = losses.clipped_policy_loss(new, old, advantages, clip_ratio=0.2)
    torch.testing.assert_close(found, torch.tensor([[-1.2, 1.5, -0.5, 0.8]], dtype=torch.float64))
    assert losses.clip_fraction(new, old, advantages, clip_ratio=0.2).tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_policy_gradient_at_ratio_one_is_minus_the_advantage():
    new = logs(0.25, 0.5).requires_grad_()
    losses.clipped_policy_loss(new, new.detach(), torch.tensor([[2.0]], dtype=torch.float64), 0.2).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[-2.0, -2.0]], dtype=torch.float64))


def test_clipped_token_has_no_gradient():
    new = logs(0.9).requires_grad_()
    losses.clipped_policy_loss(new, logs(0.3), torch.tensor([[1.0]], dtype=torch.float64), 0.2).sum().backward()
    assert new.grad is not None
    assert new.grad.item() == 0.0


def test_k3_by_hand():
    # reference/policy = 2: 2 - ln 2 - 1; equal: 0; 1/2: 1/2 + ln 2 - 1.
    found = losses.kl_k3(logs(0.1, 0.3, 0.4), logs(0.2, 0.3, 0.2))
    expected = [1 - math.log(2), 0.0, math.log(2) - 0.5]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_k3_is_unbiased_for_the_kl_divergence():
    # Summed over the policy's own distribution, k3 is the exact KL: sum p ln(p/q).
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    estimate = losses.kl_k3(logs(*policy), logs(*reference))
    exact = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    assert math.isclose((torch.tensor(policy, dtype=torch.float64) * estimate).sum().item(), exact, rel_tol=1e-12)


def test_far_off_tokens_stay_finite():
    """verl's clamps: the log-ratio at +-20, the KL estimate at 10."""
    one, far = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[-900.0]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert losses.clipped_policy_loss(zero, far, -one, 0.2).item() == math.exp(20)
    assert losses.kl_k3(far, zero).item() == 10.0
    assert losses.kl_k3(zero, far).item() == 10.0


def test_masked_sum_ignores_non_finite_padding():
    values = torch.tensor([[1.0, float("inf")], [2.0, float("nan")]])
    assert losses.masked_sum(values, torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item() == 3.0
