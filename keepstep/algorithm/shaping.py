"""What is done to rewards and masks before advantages and losses. Shapes: B responses of at most T tokens."""

from __future__ import annotations

import torch


def overlong_penalty(
    lengths: torch.Tensor, *, max_length: int, buffer_length: int, factor: float = 1.0
) -> torch.Tensor:
    """What a response's length adds to its reward: 0 up to max_length - buffer_length, then falling to -factor.

    DAPO (arXiv:2503.14476), eq. 13, soft over-long punishment; `factor` is verl's `overlong_buffer.penalty_factor`.

    Args:
        lengths: [B], tokens of each response.
        max_length: tokens at which the penalty is whole.
        buffer_length: tokens before that over which it grows; positive.

    Returns:
        [B] float32, from -factor to 0.
    """
    excess = (lengths - (max_length - buffer_length)).float() / buffer_length
    return -factor * excess.clamp(0.0, 1.0)


def mask_truncated(mask: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
    """The mask without the responses that were cut off at the length limit (DAPO, arXiv:2503.14476, section 3.4).

    Their rewards still count in their group's mean, as in TRL (`mask_truncated_completions`): only their own loss goes.

    [B, T] and [B] bool -> [B, T].
    """
    return torch.where(truncated.unsqueeze(1), torch.zeros_like(mask), mask)


def kl_in_reward(rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Rewards less the KL penalty of their tokens, [B] -> [B]: r_i - coefficient * sum_t kl_it.

    The per-token penalty of PPO with a reference (InstructGPT, arXiv:2203.02155, eq. 2). An outcome advantage sees only
    the sum over a response's tokens, so under GRPO, as in verl, the penalty is one number per response, not a credit
    per token, and long responses are penalised for more tokens.

    Args:
        rewards: [B].
        kl: [B, T], `losses.kl_penalty` of the log-probs before the update; it bears no gradient.
        mask: [B, T].
    """
    return rewards - coefficient * torch.where(mask.bool(), kl, torch.zeros_like(kl)).sum(1)
