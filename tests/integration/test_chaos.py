"""Two seeded schedules of faults; `make chaos` tries as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import Setup, num_struck, one, overlaps, schedule
from tests.conftest import OVERRIDES, TOTAL_STEPS
from tests.integration.driver import Driver

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("seed", [1, 2])
def test_a_tormented_run_ends_as_the_undisturbed_one(workspace: Path, reference: Driver, seed: int):
    record = one(seed, workspace, reference, Setup(TOTAL_STEPS, 20, OVERRIDES))
    assert record["violations"] == [], record
    assert record["struck"], "nothing was struck"


def test_faults_without_a_victim_do_not_count():
    hits = ["kill rank", "kill nobody", "stop nobody at resumed", "no prefect-server", "node", "full for 1.3 s",
            "disk not lost: nothing is in the store yet"]  # fmt: skip
    assert num_struck(hits) == 3


def test_a_schedule_is_a_function_of_its_seed():
    assert schedule(7, can_fill=True) == schedule(7, can_fill=True)
    assert len({str(schedule(seed, can_fill=True)) for seed in range(50)}) == 50


def test_overlapping_attempts_are_seen():
    events = [{"event": "step", "attempt": 1, "step": 1}, {"event": "resumed", "attempt": 2, "step": 0}]
    assert overlaps(events) == []
    assert overlaps([*events, {"event": "checkpoint_saved", "attempt": 1, "step": 2}]) != []
    assert overlaps([*events, {"event": "failed", "attempt": 1}]) == []
