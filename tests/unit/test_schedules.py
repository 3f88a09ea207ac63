"""Learning-rate factors by hand (C112, C113: they depend on the step alone)."""

import math

import pytest

from keepstep.algorithm.schedules import lr_factor


def test_warmup_is_linear_and_never_zero():
    found = [lr_factor(update, num_warmup=4, num_total=100, kind="constant") for update in range(6)]
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_halves_in_the_middle_and_ends_at_the_minimum():
    def at(update: int) -> float:
        return lr_factor(update, num_warmup=10, num_total=110, kind="cosine", min_ratio=0.1)

    assert at(10) == pytest.approx(1.0)
    assert at(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert at(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert at(110) == pytest.approx(0.1)
    assert at(500) == pytest.approx(0.1)
