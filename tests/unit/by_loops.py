"""GRPO's mathematics again, from the papers' formulas, in plain Python on lists of floats: what the tensors must give.

A batch is a list of responses, a response a list of values, one per token of its own: there is no padding here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

Rows = Sequence[Sequence[float]]


def grpo(group: Sequence[float], normalize_by_std: bool, epsilon: float) -> list[float]:
    mean = math.fsum(group) / len(group)
    if len(set(group)) == 1:
        return [0.0] * len(group)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
    return [(reward - mean) / (deviation + epsilon if normalize_by_std else 1.0) for reward in group]


def rloo(group: Sequence[float]) -> list[float]:
    found = []
    for index, reward in enumerate(group):
        others = [*group[:index], *group[index + 1 :]]
        found.append(reward - math.fsum(others) / len(others))
    return found


def surrogate(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """The loss of a token, case by case instead of by minima."""
    ratio = math.exp(log_ratio)
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    largest = math.inf if dual is None else dual
    return -advantage * min(max(ratio, 1 - low), largest)


def kl(estimator: str, log_prob: float, ref_log_prob: float) -> float:
    d = log_prob - ref_log_prob
    if estimator in ("k1", "kl"):
        return d
    if estimator == "abs":
        return abs(d)
    if estimator in ("k2", "mse"):
        return d * d / 2
    clamped = max(-20.0, min(20.0, d))
    return min(10.0, math.exp(-clamped) + clamped - 1)


def aggregate(losses: Rows, how: str, longest: int) -> float:
    """The mean of token losses as the papers write it; a response without a token counts as one."""
    if how == "token-mean":
        num_tokens = sum(len(row) for row in losses)
        return math.fsum(value for row in losses for value in row) / max(num_tokens, 1)
    sums = [math.fsum(row) for row in losses]
    if how == "seq-mean-token-mean":
        sums = [total / max(len(row), 1) for total, row in zip(sums, losses, strict=True)]
    if how == "seq-mean-token-sum-norm":
        sums = [total / longest for total in sums]
    return math.fsum(sums) / len(sums)


def distribution(logits: Sequence[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in logits]
    largest = max(scaled)
    weights = [math.exp(value - largest) for value in scaled]
    return [weight / math.fsum(weights) for weight in weights]


def entropy(logits: Sequence[float], temperature: float) -> float:
    return -math.fsum(p * math.log(p) for p in distribution(logits, temperature) if p > 0)


def numerical_gradient(
    function: Callable[[list[list[float]]], float], at: Rows, step: float = 1e-6
) -> list[list[float]]:
    """Central differences of a function of rows of numbers."""
    found = []
    for i, row in enumerate(at):
        slopes = []
        for j in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(values) for values in at]
                moved[i][j] += sign * step
                sides.append(function(moved))
            slopes.append((sides[0] - sides[1]) / (2 * step))
        found.append(slopes)
    return found


def random_rows(rng: random.Random, lengths: Sequence[int], low: float, high: float) -> list[list[float]]:
    return [[rng.uniform(low, high) for _ in range(length)] for length in lengths]


def padded(rows: Rows, before: Sequence[int], width: int, fill: float = 0.0, **kinds: Any) -> torch.Tensor:
    """[B, width] in float64: each row after `before[i]` positions of `fill`, and `fill` behind it."""
    found = torch.full((len(rows), width), fill, dtype=torch.float64)
    for index, (row, first) in enumerate(zip(rows, before, strict=True)):
        found[index, first : first + len(row)] = torch.tensor(row, dtype=torch.float64)
    return found.to(**kinds) if kinds else found


def mask_of(rows: Rows, before: Sequence[int], width: int) -> torch.Tensor:
    """[B, width] in float64: 1 where `padded` puts a value."""
    return padded([[1.0] * len(row) for row in rows], before, width)
