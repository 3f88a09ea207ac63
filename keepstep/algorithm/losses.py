"""Token-level losses of GRPO. Shapes: B responses of T tokens each; `mask` is 1 on the response's own tokens.

What stands where the mask is 0 has no influence on values or gradients, be it infinite or NaN.

The loss of a mini-batch is sum_it w_it l_it / D. `token_weights` and `loss_denominator` give w and D of a way to
average; D is summed over all rows of the mini-batch on all ranks before the first backward, so that it matters neither
how rows are cut into micro-batches nor how they are dealt to ranks. Ranks whose gradients are averaged, as FSDP does,
multiply their share by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

LARGEST_LOG_RATIO = 20.0
LARGEST_SEQUENCE_LOG_RATIO = 10.0
LARGEST_KL = 10.0

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]


@dataclass(frozen=True)
class PolicyLoss:
    """Each [B, T]."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the clip is what the minimum takes, so that no gradient flows; verl's `pg_clipfrac`."""
    clipped_lower: torch.Tensor
    """1 where the dual clip bounds the loss; verl's `pg_clipfrac_lower`."""


def masked_difference(values: torch.Tensor, others: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """values - others on the response's tokens, 0 elsewhere. [B, T] each."""
    return torch.where(mask.bool(), values - others, torch.zeros_like(values))


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log of each token's probability ratio, [B, T] each (arXiv:1707.06347, eq. 6; arXiv:2402.03300, eq. 3).

    Clamped to +-20, as verl does: one far-off token must not make the whole loss infinite.
    """
    return masked_difference(log_probs, old_log_probs, mask).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log of the length-normalised ratio of whole responses, at each of their tokens, [B, T] each.

    GSPO (arXiv:2507.18071): ln s_i = 1/|y_i| sum_t ln(pi/pi_old), eq. 7. The value is the same at all tokens of a
    response; the gradient is each token's own, ln s_it = sg[ln s_i] + ln pi_it - sg[ln pi_it], eq. 14, whose mean over
    the response is the gradient of ln s_i. Clamped to at most 10, as verl does.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    mean = masked_difference(log_probs, old_log_probs, mask).sum(1, keepdim=True) / lengths
    own = masked_difference(log_probs, log_probs.detach(), mask)
    return (own + mean.detach()).clamp(max=LARGEST_SEQUENCE_LOG_RATIO)


def policy_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate as a loss per token: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio).

    arXiv:1707.06347, eq. 7, negated; with a clip of its own on either side DAPO's (arXiv:2503.14476, eq. 8); of
    sequence ratios GSPO's (arXiv:2507.18071, eq. 5). The dual clip (arXiv:1912.09729) bounds the loss by
    -c A where A < 0, as verl's `clip_ratio_c` does for token ratios (verl leaves it out under GSPO).

    Args:
        log_ratio: [B, T], of `token_log_ratio` or `sequence_log_ratio`.
        advantages: [B, 1] or [B, T].
        dual_clip: c > 1, or None.
    """
    ratio = log_ratio.exp()
    whole = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(whole, bounded)
    clipped_lower = torch.zeros_like(loss)
    if dual_clip is not None:
        largest = -advantages * dual_clip
        clipped_lower = ((loss > largest) & (advantages < 0)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, largest), loss)
    return PolicyLoss(loss, (bounded > whole).to(loss.dtype), clipped_lower)


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) under verl's names, [B, T] each.

    With d = log_probs - ref_log_probs (Schulman, "Approximating KL divergence"): `k1` or `kl` is d; `k2` or `mse` is
    d^2 / 2; `k3` or `low_var_kl` is exp(-d) + d - 1, GRPO's own (arXiv:2402.03300, eq. 4), with d clamped to +-20 and
    the result to 10, as verl does; `abs` is |d|. As a loss the gradients of k1 and k3 are not the gradient of the KL
    (k1's is zero on average); with a `+` the value is the estimate and the gradient that of k2, which is.
    """
    difference = masked_difference(log_probs, ref_log_probs, mask)
    value = _KL[estimator.removesuffix("+")](difference)
    if not estimator.endswith("+"):
        return value
    gradient_bearer = _k2(difference)
    return gradient_bearer - gradient_bearer.detach() + value.detach()


def token_weights(mask: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Weight of each token in the sum of losses, [B, T] -> [B, T], in verl's `loss_agg_mode`.

    `token-mean` (DAPO, arXiv:2503.14476, eq. 8), `seq-mean-token-sum` and `seq-mean-token-sum-norm` (Dr. GRPO,
    arXiv:2503.20783, section 3.2) weigh all tokens equally; `seq-mean-token-mean` (GRPO, arXiv:2402.03300, eq. 3)
    weighs those of one response by 1 / its length.
    """
    if aggregation == "seq-mean-token-mean":
        return mask / mask.sum(1, keepdim=True).clamp(min=1)
    return mask


def loss_denominator(mask: torch.Tensor, aggregation: Aggregation, *, max_response_length: int) -> float:
    """What these rows add to the denominator of the mini-batch's loss, [B, T] -> number; sum it over rows and ranks.

    `token-mean` counts tokens. The others count responses, also those without a token, as verl's trainer and TRL do;
    `seq-mean-token-sum-norm` times Dr. GRPO's constant (verl's `loss_scale_factor`), here the longest response.
    """
    if aggregation == "token-mean":
        return float(mask.sum())
    return float(len(mask) * (max_response_length if aggregation == "seq-mean-token-sum-norm" else 1))


def masked_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of the values by their weights, [B, T], [B, T] -> []; a mask is a weight.

    `where`, since 0 * inf of a padded token would be NaN.
    """
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum()


def _k2(difference: torch.Tensor) -> torch.Tensor:
    return 0.5 * difference.square()


def _k3(difference: torch.Tensor) -> torch.Tensor:
    backwards = (-difference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    # expm1, since exp(x) - 1 of the small x of most tokens is rounding in float32.
    return (backwards.expm1() - backwards).clamp(max=LARGEST_KL)


_KL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": lambda difference: difference,
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
