"""Two log-probs of one sampled token: the engine's, which drew it, and the trainer's before the update.

Shapes: B responses of T tokens each; `mask` is 1 on the response's own tokens. Nothing here bears a gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from keepstep.algorithm.losses import LARGEST_LOG_RATIO, masked_difference

Level = Literal["token", "sequence"]


def truncated_weights(
    old_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Level,
    cap: float,
) -> torch.Tensor:
    """Truncated importance weights min(trainer / engine, cap), to multiply each token's policy loss by, [B, T] each.

    Truncated importance sampling (Ionides 2008); verl's `rollout_correction` with `rollout_is` = `level` and
    `rollout_is_threshold` = `cap`. `token` is the ratio of each token, `sequence` the product over its response. The
    log of either is clamped to +-20 before exp, as verl does. 0 where the mask is 0.
    """
    log_ratio = masked_difference(old_log_probs, engine_log_probs, mask)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=cap) * mask


def mismatch_metrics(
    old_log_probs: torch.Tensor, engine_log_probs: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """How far the trainer's log-probs are from the engine's, [B, T] each, under verl's names; {} without a token.

    `rollout_corr/kl` and `k3_kl` estimate KL(engine || trainer) per token; `ppl_ratio` is the mean over responses of
    exp(mean_t(engine - trainer)), `log_ppl_abs_diff` that of the exponent's size; `chi2_token` is the mean of the
    squared ratio less 1; `training/rollout_probs_diff_*` are of |p_trainer - p_engine|. Responses without a token do
    not count; what is exponentiated is clamped to +-20, so that one far-off token leaves no infinity in the records.
    """
    rows = mask.bool().any(1)
    if not rows.any():
        return {}
    kept = mask[rows].bool()
    old, engine = (torch.where(kept, values[rows].double(), 0.0) for values in (old_log_probs, engine_log_probs))
    log_ratio = (old - engine).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    log_ppl_diff = ((engine - old).sum(1) / kept.sum(1)).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    prob_gap = (old.exp() - engine.exp()).abs()[kept]
    found = {
        "rollout_corr/kl": (engine - old)[kept].mean(),
        "rollout_corr/k3_kl": (log_ratio.expm1() - log_ratio)[kept].mean(),
        "rollout_corr/ppl_ratio": log_ppl_diff.exp().mean(),
        "rollout_corr/log_ppl_abs_diff": log_ppl_diff.abs().mean(),
        "rollout_corr/chi2_token": (2 * log_ratio)[kept].exp().mean() - 1,
        "training/rollout_probs_diff_max": prob_gap.max(),
        "training/rollout_probs_diff_mean": prob_gap.mean(),
    }
    return {name: float(value) for name, value in found.items()}
