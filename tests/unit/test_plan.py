"""The resume decision over real folders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.plan import Rejection, find_stuck, plan
from keepstep.controller import taking_up
from keepstep.errors import CheckpointError, StorageError
from keepstep.run import RunDir, write_json
from tests.unit import builder

OPTIONS = {"policy": "prefer_multiple", "prefer_multiple": 100, "max_rewind_steps": None}


def run_with(folder: Path, steps: list[int]) -> RunDir:
    run = builder.run_in(folder)
    for step in steps:
        builder.write(run, step)
    return run


def damage(run: RunDir, step: int) -> None:
    path = run.checkpoint(step) / layout.OPTIMIZER
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def test_nothing_saved_begins_at_zero(tmp_path: Path):
    found = plan(builder.run_in(tmp_path), **OPTIONS)
    assert (found.step, found.describe()) == (None, ["begins at step 0: nothing was saved yet"])


def test_damaged_newest_is_rejected_by_name_and_the_next_is_taken(tmp_path: Path):
    """C64, C65, C71: only the candidate in use must be whole."""
    run = run_with(tmp_path, [20, 40, 60])
    damage(run, 60)
    damage(run, 20)
    found = plan(run, **OPTIONS)
    assert found.step == 40
    assert [(r.step, r.source) for r in found.rejections] == [(60, "local")]
    assert "actor/optimizer.pt" in found.rejections[0].reason


def test_multiple_first_and_the_loss_is_said(tmp_path: Path):
    """C82: what the choice gives up is stated before it happens."""
    run = run_with(tmp_path, [80, 100, 140])
    found = plan(run, **OPTIONS)
    assert (found.step, found.newest, found.steps_given_up) == (100, 140, 40)
    assert found.describe() == [
        "resumes at step 100 (local, verified, multiple of 100; newest is 140: 40 steps given up)"
    ]


def test_latest_pointer_is_never_believed(tmp_path: Path):
    """C76, C79, C91: pointers are hints; a dangling or wrong one changes nothing."""
    run = run_with(tmp_path, [20, 40])
    run.latest_link.symlink_to("step_999")
    run.text_of(run.latest_link).write_text("step_20\n")
    assert plan(run, **OPTIONS).step == 40


def test_none_usable_is_never_step_zero(tmp_path: Path):
    """C68, C76: step folders without a usable one stop with every reason."""
    run = run_with(tmp_path, [20, 40])
    damage(run, 20)
    damage(run, 40)
    with pytest.raises(CheckpointError) as caught:
        plan(run, **OPTIONS)
    assert "step 20 (local)" in caught.value.message and "step 40 (local)" in caught.value.message


def test_steps_that_are_gone_are_never_step_zero(tmp_path: Path):
    """C76, C106: the run has said that it saved; an empty folder is a loss to report, not a new beginning."""
    run = run_with(tmp_path, [])
    write_json(run.upload(40), {"step": 40})
    with pytest.raises(CheckpointError, match="has saved step 40"):
        plan(run, **OPTIONS)


def test_choice_that_arrived_damaged_is_passed_over(tmp_path: Path):
    """C64: a candidate that verified and fails only when it is used gives way to the next best."""
    run = run_with(tmp_path, [20, 40])
    found = plan(run, **OPTIONS, passed_over=[Rejection(40, "local", "failed when it was read")])
    assert (found.step, found.rejections[0].reason) == (20, "failed when it was read")


def test_checkpoint_of_another_run_is_rejected(tmp_path: Path):
    """C73: a folder left by an abandoned run is not taken."""
    run = run_with(tmp_path, [20])
    builder.write(run, 40, run_id="run-b")
    found = plan(run, **OPTIONS, expected_run_id="run-a")
    assert found.step == 20
    assert found.rejections[0].reason == "manifest.json: belongs to run run-b, expected run-a"


def started(attempt: int) -> dict:
    return {"event": "attempt_started", "attempt": attempt}


def resumed(attempt: int, step: int, avoided: int | None = None) -> dict:
    return {"event": "resumed", "attempt": attempt, "step": step, "plan": {"avoided_multiple": avoided}}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([started(1)], None),
        ([started(1), started(2), resumed(2, 100)], 100),
        ([started(1), started(2), resumed(2, 140)], None),
        ([started(2), resumed(2, 100), started(3), resumed(3, 140, avoided=100)], 100),
        ([started(2), resumed(2, 100), started(3)], 100),
    ],
)
def test_no_loop_rule_reads_the_last_attempt(events: list[dict], expected: int | None):
    assert find_stuck(events, prefer_multiple=100) == expected


def test_a_store_that_fails_in_a_recovery_leaves_the_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank died while the store is away: what is here is good, and the attempt need not end."""
    asked: list[Any] = []

    def make_plan(_config: Any, _run: RunDir, remote: Any, *_: Any) -> str:
        asked.append(remote)
        if remote is not None:
            raise StorageError("away")
        return "from here"

    monkeypatch.setattr(taking_up, "make_plan", make_plan)
    start = SimpleNamespace(remote="the store", total_steps=40)
    one: Any = SimpleNamespace(run=RunDir.at(tmp_path), config=None, record={}, start=start)
    with pytest.raises(StorageError):
        taking_up.plan_again(one, [])
    one.run.checkpoint(20).mkdir(parents=True)
    assert taking_up.plan_again(one, []) == "from here" and asked == ["the store", "the store", None]


def test_without_a_local_one_a_store_that_is_away_is_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It may have one: a refusal for good would be false, and another attempt asks again."""

    def make_plan(_config: Any, _run: RunDir, remote: Any, *_: Any) -> str:
        raise StorageError("away") if remote is not None else CheckpointError("none can be resumed from")

    monkeypatch.setattr(taking_up, "make_plan", make_plan)
    start = SimpleNamespace(remote="the store", total_steps=40)
    one: Any = SimpleNamespace(run=RunDir.at(tmp_path), config=None, record={}, start=start)
    one.run.checkpoint(20).mkdir(parents=True)
    with pytest.raises(StorageError, match="away"):
        taking_up.plan_again(one, [])
