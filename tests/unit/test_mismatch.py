"""Importance weights and mismatch metrics between engine and trainer, against plain loops in float64."""

import math
import random

import pytest
import torch

from keepstep.algorithm import mismatch
from tests.unit import by_loops

LENGTHS, BEFORE, WIDTH = [3, 1, 0, 4], [1, 5, 0, 2], 6


def random_batch() -> tuple[list[list[float]], list[list[float]]]:
    rng = random.Random(11)
    old = by_loops.random_rows(rng, LENGTHS, -3.0, -0.2)
    return old, [[value + rng.uniform(-1.0, 1.0) for value in row] for row in old]


def tensors(old: list[list[float]], engine: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With NaN and -inf in the padding."""
    return (
        by_loops.padded(old, BEFORE, WIDTH, fill=math.nan),
        by_loops.padded(engine, BEFORE, WIDTH, fill=-math.inf),
        by_loops.mask_of(old, BEFORE, WIDTH),
    )


@pytest.mark.parametrize("cap", [1.5, 100.0])
def test_token_weights(cap: float):
    old, engine = random_batch()
    found = mismatch.truncated_weights(*tensors(old, engine), level="token", cap=cap)
    expected = [
        [min(math.exp(o - e), cap) for o, e in zip(a, b, strict=True)] for a, b in zip(old, engine, strict=True)
    ]
    torch.testing.assert_close(found, by_loops.padded(expected, BEFORE, WIDTH), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("cap", [1.5, 100.0])
def test_sequence_weights(cap: float):
    """One weight for all tokens of a response: the product of their ratios, cut off as a whole."""
    old, engine = random_batch()
    found = mismatch.truncated_weights(*tensors(old, engine), level="sequence", cap=cap)
    expected = [
        [min(math.exp(math.fsum(o - e for o, e in zip(a, b, strict=True))), cap)] * len(a)
        for a, b in zip(old, engine, strict=True)
    ]
    torch.testing.assert_close(found, by_loops.padded(expected, BEFORE, WIDTH), rtol=1e-12, atol=0.0)


def test_weights_of_equal_log_probs_are_one():
    old, _ = random_batch()
    for level in ("token", "sequence"):
        found = mismatch.truncated_weights(*tensors(old, old), level=level, cap=2.0)
        assert torch.equal(found, by_loops.mask_of(old, BEFORE, WIDTH))


def test_far_off_tokens_have_finite_weights():
    """Log-ratios of +-900 in float32: exp(20) before the cap, as in verl, and exp(-20)."""
    old, engine, mask = torch.tensor([[-1.0, -901.0]]), torch.tensor([[-901.0, -1.0]]), torch.ones(1, 2)
    found = mismatch.truncated_weights(old, engine, mask, level="token", cap=1e12)
    torch.testing.assert_close(found, torch.tensor([[math.exp(20), math.exp(-20)]]))
    for one in (old, engine), (engine, old):
        found = mismatch.mismatch_metrics(one[0][:, 1:], one[1][:, 1:], mask[:, 1:])
        assert all(math.isfinite(value) for value in found.values())


def test_metrics_against_loops():
    old, engine = random_batch()
    found = mismatch.mismatch_metrics(*tensors(old, engine))
    pairs = [(o, e) for a, b in zip(old, engine, strict=True) for o, e in zip(a, b, strict=True)]
    rows = [(a, b) for a, b in zip(old, engine, strict=True) if a]
    gaps = [math.fsum(e - o for o, e in zip(a, b, strict=True)) / len(a) for a, b in rows]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    expected = {
        "rollout_corr/kl": mean([e - o for o, e in pairs]),
        "rollout_corr/k3_kl": mean([math.exp(o - e) - (o - e) - 1 for o, e in pairs]),
        "rollout_corr/ppl_ratio": mean([math.exp(gap) for gap in gaps]),
        "rollout_corr/log_ppl_abs_diff": mean([abs(gap) for gap in gaps]),
        "rollout_corr/chi2_token": mean([math.exp(o - e) ** 2 for o, e in pairs]) - 1,
        "training/rollout_probs_diff_max": max(abs(math.exp(o) - math.exp(e)) for o, e in pairs),
        "training/rollout_probs_diff_mean": mean([abs(math.exp(o) - math.exp(e)) for o, e in pairs]),
    }
    assert found == pytest.approx(expected, rel=1e-12)


def test_no_token_no_metrics():
    assert mismatch.mismatch_metrics(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3)) == {}
