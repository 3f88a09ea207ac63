"""Token-level losses of GRPO. Shapes: B responses of T tokens each; `mask` is 1 on the response's own tokens."""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
LARGEST_KL = 10.0


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token under logits / temperature.

    Args:
        logits: [B, T, V]; position t predicts tokens[:, t].
        tokens: [B, T].

    Returns:
        [B, T] in float32.
    """
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def entropy(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature). [B, T, V] -> [B, T]."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def clipped_policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_ratio: float
) -> torch.Tensor:
    """PPO's clipped surrogate as a loss per token (arXiv:1707.06347, eq. 7, negated).

    The log-ratio is clamped to +-20, as verl does: one far-off token must not make the whole loss infinite.

    Args:
        log_probs, old_log_probs: [B, T].
        advantages: [B, 1] or [B, T].

    Returns:
        [B, T]: -min(r A, clip(r, 1 - eps, 1 + eps) A), r = exp(log_probs - old_log_probs).
    """
    ratio = (log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages)


def clip_fraction(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_ratio: float
) -> torch.Tensor:
    """1 where the clip is what the minimum takes, so that no gradient flows. [B, T]."""
    ratio = (log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return (clipped * advantages < ratio * advantages).float()


def kl_k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference), never negative.

    DeepSeekMath eq. 4; Schulman's k3; verl calls it `low_var_kl`.

    [B, T], [B, T] -> [B, T]: exp(d) - d - 1 with d = ref_log_probs - log_probs, d clamped to +-20 and the result to 10
    as verl does.
    """
    difference = (ref_log_probs - log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(max=LARGEST_KL)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the masked tokens. [B, T], [B, T] -> []. `where`, since 0 * inf of a padded token would be NaN."""
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum()
