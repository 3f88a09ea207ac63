"""Group-relative advantages, one per response. Shapes: P prompts, each with a group of G responses.

Where all rewards of a group are equal its advantages are exactly zero, and so is that of a group of one: there is
nothing to compare with. (verl leaves a group of one its bare reward under `grpo` and `rloo`.)
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["grpo", "dr_grpo", "rloo", "grpo_passk"]


def estimate_advantages(rewards: torch.Tensor, estimator: Estimator, *, normalize_by_std: bool = True) -> torch.Tensor:
    """The advantages [P, G] by the estimator's name; verl's names, and `dr_grpo` for GRPO without the division.

    Args:
        rewards: [P, G].
        normalize_by_std: of `grpo` and `grpo_passk`; the other two never divide.
    """
    if estimator == "rloo":
        return rloo_advantages(rewards)
    if estimator == "grpo_passk":
        return passk_advantages(rewards, normalize_by_std=normalize_by_std)
    return grpo_advantages(rewards, normalize_by_std=normalize_by_std and estimator == "grpo")


def grpo_advantages(rewards: torch.Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> torch.Tensor:
    """Advantage of each response relative to the other responses to its prompt.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision: A_i = (r_i - mean(r)) / (std(r) + epsilon),
    with the unbiased standard deviation (G - 1 in the denominator) and epsilon 1e-6, both as verl has them; TRL's
    epsilon is 1e-4. Without the division it is Dr. GRPO's (arXiv:2503.20783, section 3.2).

    Args:
        rewards: [P, G].
        normalize_by_std: divide by the group's standard deviation.
        epsilon: added to the standard deviation.

    Returns:
        [P, G], same dtype.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards.shape[1] > 1:
        centred = centred / (rewards.std(dim=1, keepdim=True) + epsilon)
    return _zero_where_equal(centred, rewards)


def rloo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Reward of each response less the mean of the others' to its prompt (leave-one-out), [P, G] -> [P, G].

    RLOO (arXiv:2402.14740): A_i = r_i - 1/(G-1) sum_{j != i} r_j, which is G/(G-1) (r_i - mean(r)).
    """
    group_size = rewards.shape[1]
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return _zero_where_equal(centred * (group_size / max(group_size - 1, 1)), rewards)


def passk_advantages(rewards: torch.Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> torch.Tensor:
    """Only the best response of a group has an advantage: what it adds to the second best, [P, G] -> [P, G], G > 1.

    Pass@k training (arXiv:2503.19595) as verl's `grpo_passk`: A_best = (r_best - r_second) / (std(r) + epsilon), with
    the unbiased standard deviation; the division can be left out. A tie for the best has no advantage at all.
    """
    best = rewards.topk(2, dim=1)
    gain = best.values[:, :1] - best.values[:, 1:]
    if normalize_by_std:
        gain = gain / (rewards.std(dim=1, keepdim=True) + epsilon)
    return torch.zeros_like(rewards).scatter(1, best.indices[:, :1], gain)


def has_signal(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups dynamic sampling keeps, [P, G] -> [P] bool: those whose rewards are not all equal.

    DAPO (arXiv:2503.14476), eq. 11, for rewards of any number of values. As in verl the rewards are those before a KL
    penalty, which would make every group unequal. A group of one has no signal.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def _zero_where_equal(advantages: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    # The mean of equal rewards may be off by a rounding, which a deviation of the same size would blow up.
    return torch.where(has_signal(rewards).unsqueeze(1), advantages, torch.zeros_like(advantages))
