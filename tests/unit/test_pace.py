"""What becomes of a running step when the attempt is asked to leave: finished if it fits, dropped if it does not."""

from __future__ import annotations

import pytest

from keepstep.controller.pace import MARGIN, Pace

TOOK = {"rollout": 10.0, "reward": 1.0, "log_probs": 4.0, "update": 6.0, "weight_sync": 1.0, "validation": 20.0}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def measured() -> tuple[Pace, Clock]:
    """A pace that has seen one whole step with a validation."""
    clock = Clock()
    pace = Pace(clock)
    for name, seconds in TOOK.items():
        with pace.act(name):
            clock.now += seconds
    assert pace.end_step() == TOOK
    return pace, clock


def asked(act: str, elapsed_s: float, remaining_s: float, save_s: float) -> bool:
    pace, clock = measured()
    with pace.act(act):
        clock.now += elapsed_s
        return pace.drops(remaining_s, save_s)


@pytest.mark.parametrize(
    ("act", "elapsed_s", "left_s"),
    [
        ("rollout", 0, 22),
        ("rollout", 4, 18),
        ("rollout", 15, 27),
        ("log_probs", 1, 10),
        ("validation", 5, 15),
    ],
)
def test_what_is_left_must_fit_with_a_save(act: str, elapsed_s: float, left_s: float):
    """C151, C155: in rollout, scoring, log-probs and validation."""
    needed_s = MARGIN * left_s + 5
    assert not asked(act, elapsed_s, needed_s + 0.1, save_s=5)
    assert asked(act, elapsed_s, needed_s - 0.1, save_s=5)


@pytest.mark.parametrize("act", ["update", "weight_sync", "save"])
def test_a_policy_that_is_being_changed_is_not_left_half_way(act: str):
    assert not asked(act, 0, remaining_s=0.5, save_s=5)


def test_a_step_that_was_never_measured_is_dropped():
    pace = Pace(Clock())
    with pace.act("rollout"):
        assert pace.drops(1e6, save_s=1)


def test_nothing_runs_between_the_acts():
    pace, _ = measured()
    assert not pace.drops(0.0, save_s=1)


def test_what_was_counted_of_a_broken_off_step_is_not_counted_again():
    """The step comes once more, with new workers: its seconds are those of the second try."""
    clock = Clock()
    pace = Pace(clock)
    with pytest.raises(OSError), pace.act("rollout"):
        clock.now += 50
        raise OSError("its engine died")
    pace.begin_again()
    with pace.act("rollout"):
        clock.now += 2
    assert pace.end_step() == {"rollout": 2.0}
