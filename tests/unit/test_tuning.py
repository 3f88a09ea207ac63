"""How often to save."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.config.load import load, to_yaml
from keepstep.errors import EXIT_DONE
from keepstep.tuning import Measured, best, choices, measure
from tests.unit import standing_run
from tests.unit.standing_run import Standing


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    return standing_run.make(tmp_path)


def at(second: float, **event: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:{int(second) // 60:02d}:{second % 60:06.3f}Z", **event}


def step(second: float, number: int) -> dict[str, Any]:
    return at(second, event="step", step=number, seconds=10.0 + number)


EVENTS = [
    at(0, event="attempt_started"),
    step(20, 1),
    step(30, 2), at(33, event="checkpoint_saved", step=2), at(37, event="checkpoint_verified", step=2),
    step(50, 3),
    at(60, event="attempt_started"),
    # What a start verifies before it goes on is no save of its own.
    at(61, event="checkpoint_verified", step=2),
    step(95, 3),
    step(105, 4), at(110, event="checkpoint_saved", step=4), at(114, event="checkpoint_verified", step=4),
]  # fmt: skip


def test_what_a_run_has_measured():
    """Medians: steps of 11, 12, 13, 13, 14 s; saves verified after 7 and 9 s; one restart, from 50 s to 95 s."""
    found = measure(EVENTS, [{"timing_s/save": 0.25}, {"timing_s/rollout": 3.0}, {"timing_s/save": 0.75}])
    assert found == Measured(step_s=13.0, save_s=0.5, verify_s=8.0, restart_s=45.0)


def test_a_run_that_was_never_restarted_or_never_saved():
    found = measure(EVENTS[:5], [])
    assert found is not None and (found.restart_s, found.save_s) == (None, 0.0)
    assert measure(EVENTS[:3], []) is None


def test_the_cheapest_interval_is_youngs():
    """sqrt(2 c M) / t = sqrt(2 x 4 x 20000) / 10 = 40 steps: of the divisors of 100 the nearest by cost is 50."""
    measured = Measured(step_s=10.0, save_s=4.0, verify_s=30.0, restart_s=100.0)
    found = choices(measured, 20_000, 100.0, 100)
    # A save is verified after three steps: 1 and 2 would wait for each other.
    assert [one.save_freq for one in found] == [4, 5, 10, 20, 25, 50, 100]
    by_hand = {k: 4 / (10 * k + 4) + (10 * k / 2 + 30 + 100) / 20_000 for k in (4, 5, 10, 20, 25, 50, 100)}
    assert {one.save_freq: one.total for one in found} == pytest.approx(by_hand)
    assert best(found).save_freq == min(by_hand, key=lambda k: by_hand[k]) == 50
    assert math.isclose(math.sqrt(2 * 4 * 20_000) / 10, 40)


def test_kills_that_come_more_often_ask_for_more_saves():
    measured = Measured(step_s=10.0, save_s=1.0, verify_s=5.0, restart_s=60.0)
    cheapest = [best(choices(measured, hours * 3600, 60.0, 100)).save_freq for hours in (0.1, 1, 10, 100)]
    assert cheapest == sorted(cheapest) and cheapest[0] < cheapest[-1]


def test_saves_that_take_longer_than_a_hundred_steps_leave_the_milestones():
    measured = Measured(step_s=0.1, save_s=1.0, verify_s=60.0, restart_s=60.0)
    assert [one.save_freq for one in choices(measured, 3600, 60.0, 100)] == [100]


def test_the_command(standing: Standing, capsys: pytest.CaptureFixture[str]):
    standing.run.events.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    standing.run.config.write_text(to_yaml(load()))
    standing.run.metrics.write_text(json.dumps({"step": 2, "timing_s/save": 0.5}) + "\n")
    arguments = ["tune", str(standing.run.root), "--mtbf-hours"]
    assert main([*arguments, "1"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "a step takes 13.00 s, a save holds it up for 0.50 s and is verified after 8.0 s" in printed
    assert printed.count("<- cheapest") == 1 and "trainer.save_freq=5\n" in printed
    assert main([*arguments, "1", "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["save_freq"] == 5
    assert main([*arguments, "0"]) == 2
    assert "more than 0" in capsys.readouterr().err


def test_a_run_that_has_measured_nothing(standing: Standing, capsys: pytest.CaptureFixture[str]):
    standing.run.events.write_text("")
    assert main(["tune", str(standing.run.root), "--mtbf-hours", "1"]) == 2
    assert "no finished step with a verified checkpoint" in capsys.readouterr().err
