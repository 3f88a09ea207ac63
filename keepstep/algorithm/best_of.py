"""What k tries would bring, from n that were made."""

from __future__ import annotations

from math import comb

import numpy as np


def best_of_k(rewards: np.ndarray, k: int) -> float:
    """Mean over prompts of the expected best reward of k of the n responses, drawn without putting back.

    For rewards of 0 and 1 that is the unbiased pass@k of arXiv:2107.03374, eq. 1: the i-th smallest of n is the best of
    C(i - 1, k - 1) of the C(n, k) draws.

    Args:
        rewards: [P, n].
        k: 1 to n.
    """
    num_responses = rewards.shape[1]
    weights = np.array([comb(i, k - 1) / comb(num_responses, k) for i in range(num_responses)])
    return float(np.sort(rewards, axis=1).dot(weights).mean())


def tries(num_responses: int) -> list[int]:
    """The powers of two from 2 up to n, and n."""
    powers = [2**power for power in range(1, num_responses.bit_length()) if 2**power <= num_responses]
    return sorted({*powers, num_responses} - {1})
