"""The retry budget lives in the run's folder: it outlives a flow process that crashed, and is full at a new start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from keepstep.config.schema import RetryConfig
from keepstep.errors import BugError, NoProgressError, Preempted, WorkerDiedError
from keepstep.retry_budget import RetryBudget
from keepstep.run import RunDir, write_json

RETRY = RetryConfig(max_retries=2, delays_s=[0.0])


class Folder:
    """A run's folder whose attempts are written by hand, and the flow run's budget beside them."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir.at(path / "run")
        write_json(self.run.record, {"run_id": "a"})

    def attempt(self, budget: RetryBudget, number: int, outcome: dict[str, Any] | None, *, step: int = 7) -> None:
        """One attempt that trains `step` and ends so."""
        write_json(self.run.attempt(number), {"attempt": number, "outcome": None, "processes": []})
        for event in ({"event": "attempt_started"}, {"event": "step", "step": step}):
            event |= {"attempt": number}
            with self.run.events.open("a") as file:
                file.write(json.dumps(event) + "\n")
            budget.hear(event)
        if outcome is not None:
            write_json(self.run.attempt(number), {"attempt": number, "outcome": outcome, "processes": []})

    def budget(self, flow_run: str = "one") -> RetryBudget:
        return RetryBudget(self.run, flow_run, RETRY)


def failed(message: str, failure_class: str = "bug") -> dict[str, Any]:
    return {"status": "failed", "class": failure_class, "message": message}


def test_a_flow_run_that_is_run_again_goes_on_with_what_it_had_used(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    assert budget.decide() is None and not budget.has_resumed
    for number in (1, 2):
        folder.attempt(budget, number, failed(f"boom {number}"), step=number)
        assert budget.failed(BugError(f"boom {number}")).retry
    # kill -9 of the flow, which is run again.
    again = folder.budget()
    assert not again.has_resumed, "both began at step 0"
    found = again.decide()
    assert found is not None and found.retry
    folder.attempt(again, 3, failed("boom 3"), step=3)
    found = again.failed(BugError("boom 3"))
    assert (found.retry, found.name) == (False, "RetriesExhausted")


def test_a_new_start_has_a_full_budget(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    for number in (1, 2, 3):
        folder.attempt(budget, number, failed(f"boom {number}"), step=number)
        last = budget.failed(BugError(f"boom {number}"))
    assert not last.retry
    other = folder.budget("two")
    assert other.decide() is None
    folder.attempt(other, 4, failed("boom 4"), step=4)
    assert other.failed(BugError("boom 4")).retry


def test_the_same_flow_run_that_has_failed_for_good_may_be_tried_by_a_person(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    folder.attempt(budget, 1, failed("rows", "data"))
    assert not budget.failed(BugError("rows")).retry
    refused = folder.budget().decide()
    assert refused is not None and not refused.retry, "until the flow has said that it failed, it counts"
    budget.start_over()
    assert folder.budget().decide() is None


def test_a_flow_that_is_killed_at_one_step_again_and_again_ends(tmp_path: Path):
    """The automation has no limit of its own."""
    folder = Folder(tmp_path)
    for number in range(1, 6):
        budget = folder.budget()
        found = budget.decide()
        assert found is None or found.retry
        folder.attempt(budget, number, None)
    found = folder.budget().decide()
    assert found is not None
    assert (found.retry, found.name) == (False, "SameFailure")
    assert isinstance(folder.budget().error(), WorkerDiedError)


def test_numbers_of_processes_do_not_make_a_kill_another_one(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    for number in range(1, 6):
        folder.attempt(budget, number, None)
        found = budget.failed(WorkerDiedError(f"the trainer's process {number} ended with -9"))
    assert not found.retry


def test_who_ended_a_silent_trainer_knows_the_class(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    folder.attempt(budget, 1, None)
    budget.failed(NoProgressError("Nothing was heard of the trainer."))
    assert budget.last is not None and budget.last.failure_class == "no_progress"


def test_a_start_that_was_refused_has_no_attempt_and_counts(tmp_path: Path):
    folder = Folder(tmp_path)
    budget = folder.budget()
    folder.attempt(budget, 1, {"status": "preempted", "class": "preempted", "message": "Asked to leave."})
    assert budget.failed(Preempted("Asked to leave.")).retry
    assert budget.failed(NoProgressError("the cluster is full")).retry
    found = budget.failed(NoProgressError("the cluster is full"))
    assert (found.retry, found.name) == (False, "SameFailure")


def test_the_folder_is_not_touched_before_it_is_a_run(tmp_path: Path):
    run = RunDir.at(tmp_path / "none")
    budget = RetryBudget(run, "one", RETRY)
    budget.hear({"event": "attempt_started", "attempt": 1})
    budget.start_over()
    assert not run.root.exists()


def test_a_checkpoint_that_was_asked_for_is_taken_up_once(tmp_path: Path):
    """Not before: an attempt that died on the way to it has fulfilled nothing."""
    folder = Folder(tmp_path)
    budget = folder.budget()
    folder.attempt(budget, 1, failed("boom"), step=1)
    assert not folder.budget().has_resumed
    event = {"attempt": 1, "event": "resumed", "step": 20}
    with folder.run.events.open("a") as file:
        file.write(json.dumps(event) + "\n")
    budget.hear(event)
    assert budget.has_resumed and folder.budget().has_resumed and not folder.budget("another").has_resumed
