"""Losses against values worked out by hand from the published formulas."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.algorithm import losses
from tests.unit import by_loops

LENGTHS = [3, 1, 0, 5, 2]
"""Tokens of the responses of the batches below: one has a single token, one none."""
BEFORE = [2, 0, 1, 1, 4]
"""Padding (or prompt) before each."""
WIDTH = 7
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ADVANTAGES = [1.3, -0.7, 2.0, -1.1, 0.0]


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([[math.log(value) for value in values]], dtype=torch.float64)


def clipped(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> losses.PolicyLoss:
    """The token losses of one clip ratio, 0.2."""
    log_ratio = losses.token_log_ratio(new, old, torch.ones_like(new))
    return losses.policy_loss(log_ratio, advantages, clip_low=0.2, clip_high=0.2)


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return losses.kl_penalty(policy, reference, torch.ones_like(policy), "k3")


def test_clip_binds_only_where_it_takes_away():
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages +1, -1, +1, -1 and eps 0.2:
    # min(1.5, 1.2), min(-1.5, -1.2), min(0.5, 0.8), min(-0.5, -0.8), negated.
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    old = logs(0.2, 0.2, 0.2, 0.2)
    new = logs(0.3, 0.3, 0.1, 0.1)
    found = clipped(new, old, advantages)
    torch.testing.assert_close(found.loss, torch.tensor([[-1.2, 1.5, -0.5, 0.8]], dtype=torch.float64))
    assert found.clipped.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_policy_gradient_at_ratio_one_is_minus_the_advantage():
    new = logs(0.25, 0.5).requires_grad_()
    clipped(new, new.detach(), torch.tensor([[2.0]], dtype=torch.float64)).loss.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[-2.0, -2.0]], dtype=torch.float64))


def test_clipped_token_has_no_gradient():
    new = logs(0.9).requires_grad_()
    clipped(new, logs(0.3), torch.tensor([[1.0]], dtype=torch.float64)).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == 0.0


def test_k3_by_hand():
    # reference/policy = 2: 2 - ln 2 - 1; equal: 0; 1/2: 1/2 + ln 2 - 1.
    found = k3(logs(0.1, 0.3, 0.4), logs(0.2, 0.3, 0.2))
    expected = [1 - math.log(2), 0.0, math.log(2) - 0.5]
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_k3_is_unbiased_for_the_kl_divergence():
    # Summed over the policy's own distribution, k3 is the exact KL: sum p ln(p/q).
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    estimate = k3(logs(*policy), logs(*reference))
    exact = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    assert math.isclose((torch.tensor(policy, dtype=torch.float64) * estimate).sum().item(), exact, rel_tol=1e-12)


def test_far_off_tokens_stay_finite():
    """verl's clamps: the log-ratio at +-20, the KL estimate at 10."""
    one, far = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[-900.0]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert clipped(zero, far, -one).loss.item() == math.exp(20)
    assert k3(far, zero).item() == 10.0
    assert k3(zero, far).item() == 10.0


def test_masked_sum_ignores_non_finite_padding():
    values = torch.tensor([[1.0, float("inf")], [2.0, float("nan")]])
    assert losses.masked_sum(values, torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item() == 3.0


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    """Ratio 5, eps 0.2, c 3: A = -1 costs 3 instead of 5 and has no gradient; A = +1 is the ordinary clip's 1.2."""
    log_ratio = torch.tensor([[math.log(5), math.log(5), math.log(2)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, -1.0]], dtype=torch.float64)
    found = losses.policy_loss(log_ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    torch.testing.assert_close(found.loss, torch.tensor([[3.0, -1.2, 2.0]], dtype=torch.float64))
    assert found.clipped.tolist() == [[0.0, 1.0, 0.0]]
    assert found.clipped_lower.tolist() == [[1.0, 0.0, 0.0]]
    found.loss.sum().backward()
    assert log_ratio.grad is not None
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[0.0, 0.0, 2.0]], dtype=torch.float64))


def test_clips_apart():
    """Ratios 1.25 and 0.75 with A = +1 and -1: 1 - 0.2 below binds, 1 + 0.28 above does not yet."""
    log_ratio = logs(1.25, 0.75)
    found = losses.policy_loss(log_ratio, torch.tensor([[1.0, -1.0]]).double(), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(found.loss, torch.tensor([[-1.25, 0.8]], dtype=torch.float64))
    assert found.clipped.tolist() == [[0.0, 1.0]]


def random_batch(seed: int, spread: float) -> tuple[list[list[float]], list[list[float]]]:
    rng = random.Random(seed)
    new = by_loops.random_rows(rng, LENGTHS, -3.0, -0.1)
    old = [[value + rng.uniform(-spread, spread) for value in row] for row in new]
    return new, old


def plain_token_loss(new: list[list[float]], old: list[list[float]], how: str, dual: float | None) -> float:
    """GRPO's loss of the batch: token ratios, clips 0.2 and 0.3."""
    rows = [
        [by_loops.surrogate(n - o, advantage, 0.2, 0.3, dual) for n, o in zip(new_row, old_row, strict=True)]
        for new_row, old_row, advantage in zip(new, old, ADVANTAGES, strict=True)
    ]
    return by_loops.aggregate(rows, how, WIDTH)


def plain_sequence_loss(new: list[list[float]], old: list[list[float]], how: str) -> float:
    """GSPO's loss of the batch: one ratio per response, the same at each of its tokens."""
    rows = []
    for new_row, old_row, advantage in zip(new, old, ADVANTAGES, strict=True):
        log_ratio = math.fsum(n - o for n, o in zip(new_row, old_row, strict=True)) / max(len(new_row), 1)
        rows.append([by_loops.surrogate(log_ratio, advantage, 0.2, 0.3, None)] * len(new_row))
    return by_loops.aggregate(rows, how, WIDTH)


def tensor_loss(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, how: str, level: str, dual: float | None):
    ratio = losses.token_log_ratio if level == "token" else losses.sequence_log_ratio
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64).unsqueeze(1)
    found = losses.policy_loss(ratio(new, old, mask), advantages, clip_low=0.2, clip_high=0.3, dual_clip=dual)
    weights = losses.token_weights(mask, how)
    return losses.masked_sum(found.loss, weights) / losses.loss_denominator(mask, how, max_response_length=WIDTH)


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("dual", [None, 1.6])
def test_token_level_loss_and_gradient_against_loops(how: str, dual: float | None):
    new, old = random_batch(seed=3, spread=0.9)
    mask = by_loops.mask_of(new, BEFORE, WIDTH)
    # NaN in all padding: it must not show.
    inputs = by_loops.padded(new, BEFORE, WIDTH, fill=math.nan).requires_grad_()
    loss = tensor_loss(inputs, by_loops.padded(old, BEFORE, WIDTH, fill=math.inf), mask, how, "token", dual)
    assert math.isclose(loss.item(), plain_token_loss(new, old, how, dual), rel_tol=1e-12)
    loss.backward()
    assert inputs.grad is not None
    expected = by_loops.numerical_gradient(lambda rows: plain_token_loss(rows, old, how, dual), new)
    torch.testing.assert_close(inputs.grad, by_loops.padded(expected, BEFORE, WIDTH), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_sequence_level_loss_and_gradient_against_loops(how: str):
    """The token-wise form with its stopped gradients has the value and the gradient of one ratio per response.

    So it has under every aggregation: each weighs the tokens of one response equally.
    """
    new, old = random_batch(seed=4, spread=0.9)
    mask = by_loops.mask_of(new, BEFORE, WIDTH)
    inputs = by_loops.padded(new, BEFORE, WIDTH, fill=-math.inf).requires_grad_()
    loss = tensor_loss(inputs, by_loops.padded(old, BEFORE, WIDTH, fill=-math.inf), mask, how, "sequence", None)
    assert math.isclose(loss.item(), plain_sequence_loss(new, old, how), rel_tol=1e-12)
    loss.backward()
    assert inputs.grad is not None
    expected = by_loops.numerical_gradient(lambda rows: plain_sequence_loss(rows, old, how), new)
    torch.testing.assert_close(inputs.grad, by_loops.padded(expected, BEFORE, WIDTH), rtol=1e-6, atol=1e-9)


def test_gradient_of_a_sequence_ratio_is_each_tokens_own():
    """With a weight per token (an engine weight, say) GSPO's eq. 14 gives token t its own, not the response's mean."""
    new = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    found = losses.sequence_log_ratio(new, new.detach() - 0.5, mask)
    assert found.tolist() == [[0.5, 0.5, 0.5]]
    (found * torch.tensor([[3.0, 5.0, 7.0]])).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[3.0, 5.0, 0.0]]


def test_sequence_ratio_is_clamped_above_as_in_verl():
    """A mean log-ratio of 30 counts as 10 and has no gradient; one of -30 stays."""
    new = torch.tensor([[0.0, 0.0], [-60.0, -60.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-60.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    found = losses.sequence_log_ratio(new, old, torch.ones(2, 2, dtype=torch.float64))
    assert found.tolist() == [[10.0, 10.0], [-60.0, -60.0]]
    found.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]


ESTIMATORS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimators_against_loops(estimator: str):
    new, ref = random_batch(seed=5, spread=2.0)
    mask = by_loops.mask_of(new, BEFORE, WIDTH)
    inputs = by_loops.padded(new, BEFORE, WIDTH, fill=-math.inf).requires_grad_()
    found = losses.kl_penalty(inputs, by_loops.padded(ref, BEFORE, WIDTH, fill=math.nan), mask, estimator)

    def total(rows: list[list[float]]) -> float:
        pairs = [
            (n, r) for new_row, ref_row in zip(rows, ref, strict=True) for n, r in zip(new_row, ref_row, strict=True)
        ]
        return math.fsum(by_loops.kl(estimator, n, r) for n, r in pairs)

    expected = [
        [by_loops.kl(estimator, n, r) for n, r in zip(a, b, strict=True)] for a, b in zip(new, ref, strict=True)
    ]
    torch.testing.assert_close(found, by_loops.padded(expected, BEFORE, WIDTH), rtol=1e-12, atol=1e-15)
    losses.masked_sum(found, mask).backward()
    assert inputs.grad is not None
    slopes = by_loops.padded(by_loops.numerical_gradient(total, new), BEFORE, WIDTH)
    torch.testing.assert_close(inputs.grad, slopes, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", ["kl", "k1", "abs", "low_var_kl", "k3"])
def test_plus_has_the_value_of_the_estimate_and_the_gradient_of_k2(estimator: str):
    """d k2 / d log_prob is the log-ratio itself."""
    new, ref = logs(0.5, 0.1, 0.3).requires_grad_(), logs(0.2, 0.4, 0.3)
    mask = torch.ones(1, 3, dtype=torch.float64)
    found = losses.kl_penalty(new, ref, mask, estimator + "+")
    torch.testing.assert_close(found, losses.kl_penalty(new, ref, mask, estimator))
    found.sum().backward()
    torch.testing.assert_close(new.grad, logs(0.5 / 0.2, 0.1 / 0.4, 1.0))


def test_k3_of_small_differences_in_float32():
    """d = 2^-13 is exact in float32 and k3 = d^2/2 + d^3/6 + ...; exp(d) - d - 1 in float32 would be 0."""
    d = 2.0**-13
    found = losses.kl_penalty(torch.tensor([[-d]]), torch.zeros(1, 1), torch.ones(1, 1), "k3")
    assert math.isclose(found.item(), d * d / 2 + d**3 / 6, rel_tol=1e-3)


def test_far_off_tokens_under_every_option():
    """Log-ratios of +-900 in float32: nothing is infinite but the estimators that have no bound, as in verl."""
    far, zero, mask = torch.tensor([[-900.0, 900.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    for ratio in (losses.token_log_ratio, losses.sequence_log_ratio):
        new = far.clone().requires_grad_()
        for sign in (1.0, -1.0):
            found = losses.policy_loss(ratio(new, zero, mask), torch.tensor([[sign]]), clip_low=0.2, clip_high=0.2)
            found.loss.sum().backward()
            assert found.loss.isfinite().all()
        assert new.grad is not None
        assert new.grad.isfinite().all()
    new = far.clone().requires_grad_()
    found = losses.kl_penalty(new, zero, mask, "k3")
    assert found.tolist() == [[10.0, 10.0]]
    found.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[0.0, 0.0]]
    assert losses.kl_penalty(far, zero, mask, "k1").tolist() == [[-900.0, 900.0]]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_but_padding(how: str, level: str):
    """A mini-batch whose tokens are all masked has loss 0 and no gradient."""
    new = torch.full((5, WIDTH), math.nan, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(5, WIDTH, dtype=torch.float64)
    ratio = losses.token_log_ratio if level == "token" else losses.sequence_log_ratio
    policy = losses.policy_loss(ratio(new, new.detach(), mask), torch.ones(5, 1), clip_low=0.2, clip_high=0.2)
    loss = policy.loss + losses.kl_penalty(new, new.detach(), mask, "k3+")
    denominator = losses.loss_denominator(mask, how, max_response_length=WIDTH)
    found = losses.masked_sum(loss, losses.token_weights(mask, how)) / max(denominator, 1.0)
    found.backward()
    assert found.item() == 0.0
    assert new.grad is not None
    assert new.grad.tolist() == torch.zeros(5, WIDTH).tolist()


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, old ones, advantages and mask of up to 6 responses of up to 5 tokens, anything in the padding."""
    num_rows = draw(st.integers(1, 6))
    rng = random.Random(draw(st.integers(0, 10**6)))
    mask = torch.tensor([[float(rng.random() < 0.6) for _ in range(5)] for _ in range(num_rows)], dtype=torch.float64)
    junk = torch.tensor([[rng.choice([math.nan, math.inf, -math.inf, 7.0]) for _ in range(5)] for _ in range(num_rows)])
    values = [
        torch.tensor([[rng.uniform(-4, 0) for _ in range(5)] for _ in range(num_rows)]).double() for _ in range(2)
    ]
    new, old = (torch.where(mask.bool(), value, junk.double()) for value in values)
    advantages = torch.tensor([[rng.uniform(-2, 2)] for _ in range(num_rows)], dtype=torch.float64)
    return new, old, advantages, mask


def loss_of_pieces(batch: tuple[torch.Tensor, ...], pieces: list[list[int]], level: str, how: str) -> torch.Tensor:
    """The loss as the ranks work it out: the denominator of all rows first, then a sum over pieces."""
    new, old, advantages, mask = batch
    ratio = losses.token_log_ratio if level == "token" else losses.sequence_log_ratio
    denominator = sum(losses.loss_denominator(mask[piece], how, max_response_length=9) for piece in pieces)
    total = torch.zeros((), dtype=torch.float64)
    for piece in pieces:
        log_ratio = ratio(new[piece], old[piece], mask[piece])
        found = losses.policy_loss(log_ratio, advantages[piece], clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        loss = found.loss + 0.1 * losses.kl_penalty(new[piece], old[piece], mask[piece], "k3")
        total = total + losses.masked_sum(loss, losses.token_weights(mask[piece], how)) / max(denominator, 1.0)
    return total


@given(batch=batches(), level=st.sampled_from(["token", "sequence"]), how=st.sampled_from(AGGREGATIONS), data=st.data())
@settings(max_examples=150, deadline=None)
def test_rows_may_be_permuted_padded_and_split(
    batch: tuple[torch.Tensor, ...], level: str, how: str, data: st.DataObject
):
    """The loss of the whole is that of its rows in any order, in any pieces, with more padding on either side."""
    num_rows = len(batch[0])
    whole = loss_of_pieces(batch, [list(range(num_rows))], level, how)
    order = data.draw(st.permutations(range(num_rows)))
    cut = data.draw(st.integers(0, num_rows))
    before, behind = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    new, old, advantages, mask = batch
    wider = [torch.nn.functional.pad(value, (before, behind), value=math.nan) for value in (new, old)]
    moved = (*wider, advantages, torch.nn.functional.pad(mask, (before, behind)))
    pieces = [piece for piece in (order[:cut], order[cut:]) if piece]
    assert math.isclose(whole.item(), loss_of_pieces(moved, pieces, level, how).item(), rel_tol=1e-9, abs_tol=1e-12)
