"""How a run ends once its loop has: the saves that are owed, and what is said where one could not be made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller.children import ChildResult
from keepstep.controller.leaving import StepDropped
from keepstep.controller.saver import SaveContext, Saver
from keepstep.controller.training import train_to_end
from keepstep.errors import NoProgressError, NoRoomError, Preempted
from keepstep.events.log import EventLog
from keepstep.run import RunDir

TOTAL = 10


class Loop:
    """A trainer and a saver in one: its loop ends at `step`, saves are made as `makes` says, in order."""

    def __init__(self, step: int, makes: list[str], *, saved: int | None = None, fit: Callable[[], None] = int) -> None:
        self.state = SimpleNamespace(global_step=step)
        self.pace = SimpleNamespace(begin_again=lambda: self.did.append("begin again"))
        self.last_saved, self.wanted = saved, False
        self.fit, self._makes, self.did = fit, makes, list[str]()

    def sync_weights(self) -> None:
        self.did.append("sync")

    def take_metrics(self) -> None:
        self.did.append("take")

    def save(self) -> None:
        self.did.append("save")
        made = self._makes.pop(0)
        self.last_saved = None if made == "no room" else self.state.global_step
        self.wanted = made == "rejected"

    def wait(self) -> None:
        self.did.append("wait")


def end(loop: Loop) -> None:
    session: Any = SimpleNamespace(
        config=load("quickstart"),
        start=SimpleNamespace(total_steps=TOTAL),
        leaving=SimpleNamespace(remaining_s=lambda: 60.0),
        uploader=None,
    )
    train_to_end(session, loop, SimpleNamespace(scorer=loop, saver=loop))  # type: ignore[arg-type]


def test_what_a_broken_off_step_left_is_put_away_first():
    """Its parts of rewards and its seconds would be counted in the step that comes again."""
    loop = Loop(TOTAL, [], saved=TOTAL)
    end(loop)
    assert loop.did == ["take", "begin again", "sync", "wait"]


def test_a_last_save_that_is_rejected_is_made_again():
    loop = Loop(TOTAL, ["rejected", "good"])
    end(loop)
    assert loop.did.count("save") == 2 and loop.did[-1] == "wait"


def test_without_room_for_the_last_step_the_run_is_not_complete():
    """C38: the last step is saved, or the run has not ended."""
    with pytest.raises(NoRoomError, match="Step 10 could not be saved: no room"):
        end(Loop(TOTAL, ["no room"]))


def drop() -> None:
    raise StepDropped


def test_who_is_asked_to_leave_without_room_says_that_nothing_was_saved():
    """With checkpoint.on_no_room=skip: a notice all the same, so that the run is tried again from what there is."""
    with pytest.raises(Preempted, match="step 7 could not be saved, there is no room") as left:
        end(Loop(7, ["no room"], fit=drop))
    assert "from the last step that was" in left.value.remedy


def test_who_is_asked_to_leave_saves_what_stands():
    with pytest.raises(Preempted, match="step 7 is saved and verified"):
        end(Loop(7, ["good"], fit=drop))


def test_a_last_validation_that_is_dropped_leaves_the_last_step_unsaved():
    """C128: saved, it would be taken for the end of the run."""
    loop = Loop(TOTAL, [], fit=drop)
    with pytest.raises(Preempted, match="in the last validation"):
        end(loop)
    assert "save" not in loop.did


def test_a_verification_that_takes_too_long_is_said_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """C29: a limit and a message of its own; the disk hangs, so the attempt is tried again."""
    config = load("quickstart", ["checkpoint.verify_timeout_s=90"])
    run = RunDir(tmp_path)
    context = SaveContext(run, "run-a", config, "", "", 1, False, TOTAL, None)
    writers: Any = SimpleNamespace(
        save=lambda *_: SimpleNamespace(num_bytes=1, outcome="saved", quarantined=None), end=lambda: None
    )
    attempt: Any = SimpleNamespace(number=1, check=lambda: None)
    saver = Saver(context, attempt, EventLog(run.events, 1), None, lambda: writers, writers)
    limits: list[float] = []

    def hangs(arguments: list[str], *, timeout_s: float, **_: Any) -> ChildResult:
        limits.append(timeout_s)
        return ChildResult(None, "", "")

    monkeypatch.setattr("keepstep.controller.saver.run_command", hangs)
    state: Any = SimpleNamespace(global_step=7, to_record=lambda num_rows: {})
    copied = threading.Event()
    ranks: Any = SimpleNamespace(identities=[], snapshots=lambda shared: [], await_copies=lambda *_: copied.set())
    writers.shares_memory_with = lambda hosts: []
    saver.save(state, ranks)
    with pytest.raises(NoProgressError, match=r"The verification of step 7 did not end within 90 s\.") as late:
        saver.wait()
    assert "checkpoint.verify_timeout_s" in late.value.remedy and late.value.retry
    assert copied.is_set() and limits == [90.0]
    saver.close()
