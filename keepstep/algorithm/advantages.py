"""Group-relative advantages."""

from __future__ import annotations

import torch


def grpo_advantages(rewards: torch.Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> torch.Tensor:
    """Advantage of each response relative to the other responses to its prompt.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision: A_i = (r_i - mean(r)) / std(r), with the
    unbiased standard deviation. Without the division it is Dr. GRPO's (arXiv:2503.20783, eq. 2).

    Args:
        rewards: [num_prompts, group_size].
        normalize_by_std: divide by the group's standard deviation.
        epsilon: added to the standard deviation; an all-equal group gets zeros.

    Returns:
        [num_prompts, group_size], same dtype.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if not normalize_by_std:
        return centred
    if rewards.shape[1] == 1:
        # One response has no group: its unbiased deviation is undefined and its advantage is zero.
        return torch.zeros_like(rewards)
    # The mean of equal rewards may be off by a rounding, which a deviation of the same size would blow up.
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, centred / (rewards.std(dim=1, keepdim=True) + epsilon))
