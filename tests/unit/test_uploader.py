"""Order of uploads, and what the uploader's process says while it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.attempts import Attempt
from keepstep.checkpoint import layout
from keepstep.cli.transfer import CONFIG_VARIABLE
from keepstep.cli.transfer import _configs as configs_of
from keepstep.config.load import load
from keepstep.controller import uploader
from keepstep.controller.children import ChildResult, run_command
from keepstep.controller.uploader import Uploader, most_wanted
from keepstep.errors import EXIT_HELD, DamagedStepError, StorageRefusedError
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir
from tests.unit import builder

STEPS = (20, 100, 140, 200, 220)
DIFFERS = ChildResult(6, '{"class": "local_file_differs", "message": "actor/optimizer.pt differs"}', "")


@pytest.mark.parametrize(
    ("waiting", "first"),
    [([20, 40], 40), ([200, 340, 300, 360], 300), ([360, 340], 360), ([0, 20], 20), ([100], 100)],
)
def test_newest_milestone_first_then_newest(waiting: list[int], first: int) -> None:
    assert most_wanted(waiting, 100) == first


@pytest.fixture
def attempt(tmp_path: Path) -> Any:
    found = Attempt.acquire(RunDir.at(tmp_path / "run"), others=[], lease_timeout_s=90, heartbeat_s=60)
    yield found
    found.close({"status": "finished"})


def start(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, command: Any) -> tuple[Uploader, EventLog]:
    monkeypatch.setattr(uploader, "run_command", command)
    events = EventLog(attempt.run.events, attempt.number)
    config = load("quickstart", [f"trainer.output_dir={attempt.run.root}", "resume.prefer_multiple=100"])
    for step in STEPS:
        attempt.run.checkpoint(step).mkdir(parents=True)
    return Uploader(attempt.run, config, attempt, events, {}), events


def test_queue_is_served_by_milestone(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    begun, go_on, served = threading.Event(), threading.Event(), []

    def command(arguments: list[str], **_: Any) -> ChildResult:
        served.append(int(arguments[3]))
        begun.set()
        assert go_on.wait(10)
        return ChildResult(0, '{"retired": [{"step": 20, "reason": "no rule keeps it"}]}', "")

    queue, _ = start(attempt, monkeypatch, command)
    queue.add(20)
    assert begun.wait(10)
    for step in (100, 140, 200, 220):
        queue.add(step)
    go_on.set()
    queue.drain(10)
    assert served == [20, 200, 100, 220, 140]
    pruned = [event for event in read_jsonl(attempt.run.events) if event["event"] == "checkpoint_pruned"]
    assert {(event["step"], event["source"]) for event in pruned} == {(20, "s3")}


def test_fenced_upload_ends_the_attempt(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ChildResult(EXIT_HELD, '{"class": "fenced", "message": "stale"}', "")
    queue, _ = start(attempt, monkeypatch, lambda *_, **__: answer)
    queue.add(20)
    with pytest.raises(StorageRefusedError, match="stale"):
        queue.drain(10)
    assert attempt.fenced.is_set()


def told(attempt: Attempt, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(attempt.run.events) if event["event"] == kind]


def test_a_step_that_left_the_disk_is_owed_no_more(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """checkpoint.max_disk_bytes let it go while the store was away: the run can be done without it."""
    queue, _ = start(attempt, monkeypatch, None)
    attempt.run.checkpoint(100).rmdir()
    queue.add(100)
    queue.drain(10)
    assert [event["step"] for event in told(attempt, "upload_failed")] == [100]


def test_a_step_that_rotted_while_it_waited_is_set_aside(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of the run would be asked for it at every start; of the newest step it is right to ask."""
    queue, events = start(attempt, monkeypatch, lambda *_, **__: DIFFERS)
    events.emit("checkpoint_verified", step=100)
    events.emit("checkpoint_verified", step=220)
    queue.add(100)
    queue.add(220)
    with pytest.raises(DamagedStepError, match=r"step 220 is not in .* differs") as damaged:
        queue.drain(10)
    assert damaged.value.retry, "the plan of the next attempt mends it or sets it aside"
    assert [(event["step"], event["reason"]) for event in told(attempt, "checkpoint_rejected")] == [
        (100, "actor/optimizer.pt differs")
    ]
    assert not attempt.run.checkpoint(100).exists() and attempt.run.checkpoint(220).exists()
    assert [path.name for path in attempt.run.quarantine.iterdir()] == ["step_100.damaged.1"]


def test_a_step_that_only_could_not_be_read_stays_and_is_uploaded(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's disk was away for a moment: the uploader's word alone condemns nothing."""
    answers = [DIFFERS, ChildResult(0, '{"retired": []}', "")]
    queue, events = start(attempt, monkeypatch, lambda *_, **__: answers.pop(0))
    attempt.run.checkpoint(100).rmdir()
    builder.write(attempt.run, 100)
    events.emit("checkpoint_verified", step=100)
    events.emit("checkpoint_verified", step=220)
    queue.add(100)
    queue.drain(20)
    assert answers == [] and told(attempt, "checkpoint_rejected") == []
    assert [event["step"] for event in told(attempt, "checkpoint_uploaded")] == [100]


def test_a_step_whose_reference_alone_is_damaged_stays_to_be_mended(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, events = start(attempt, monkeypatch, lambda *_, **__: DIFFERS)
    attempt.run.checkpoint(100).rmdir()
    builder.write(attempt.run, 100)
    reference = attempt.run.checkpoint(100) / layout.REF
    reference.write_bytes(reference.read_bytes()[:-1] + b"x")
    events.emit("checkpoint_verified", step=220)
    queue.add(100)
    with pytest.raises(DamagedStepError):
        queue.drain(20)
    assert attempt.run.checkpoint(100).exists() and told(attempt, "checkpoint_rejected") == []


def test_after_its_end_it_begins_nothing(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def command(arguments: list[str], **_: Any) -> ChildResult:
        begun.append(arguments[3])
        queue.close()
        return ChildResult(6, '{"class": "storage", "message": "away"}', "")

    queue, _ = start(attempt, monkeypatch, command)
    queue.add(20)
    queue.add(140)
    queue._thread.join(10)
    assert not queue._thread.is_alive() and len(begun) == 1


def test_progress_lines_become_events_and_others_stay(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, _ = start(attempt, monkeypatch, None)
    line = '{"upload_progress": {"step": 20, "done_bytes": 5, "num_bytes": 9}}'
    assert [queue._tell_progress(text) for text in (line, "{}", "[1]", "Traceback: x")] == [True, False, False, False]
    (event,) = [event for event in read_jsonl(attempt.run.events) if event["event"] == "upload_progress"]
    assert (event["step"], event["done_bytes"], event["num_bytes"]) == (20, 5, 9)
    queue.drain(10)


def test_lines_of_a_child_are_seen_and_those_taken_are_left_out(attempt: Attempt) -> None:
    seen: list[str] = []

    def take(line: str) -> bool:
        seen.append(line)
        return line.startswith("usage")

    found = run_command(["no-such-command"], attempt=attempt, role="uploader", timeout_s=60, on_line=take)
    assert found.status == 2
    assert "".join(seen).startswith("usage")
    assert found.stderr
    assert not found.stderr.startswith("usage")


def test_upload_process_gets_the_settings_of_this_start(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another start writes into config.yaml."""
    queue, _ = start(attempt, monkeypatch, None)
    monkeypatch.setenv(CONFIG_VARIABLE, queue._environment[CONFIG_VARIABLE])
    config = load("quickstart", [f"trainer.output_dir={attempt.run.root}"])
    assert configs_of(attempt.run) == (config.s3, config.checkpoint)
    queue.drain(10)
