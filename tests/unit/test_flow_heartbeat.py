"""A flow on another host: whether it lives is told by its own heartbeat, and what its silence means for a new start."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.attempts import Attempt, FlowHeartbeat, claim, flow_heartbeat, judge
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json, write_json

NOW, LEASE_S = 1000.0, 90.0
FLOW = ProcessRef("flow", 20, 1, "far")


def record(owner_host: str = "here", **changes: Any) -> dict[str, Any]:
    owner = {"host": owner_host, "pid": 10, "start_time": 1, "boot_id": "boot"}
    values = {"attempt": 3, "owner": owner, "heartbeat": NOW - 1, "outcome": None, "processes": [FLOW.to_record()]}
    return values | changes


def decide(held: dict[str, Any], **facts: Any) -> str:
    alive = lambda ref: ref.pid == 10  # noqa: E731
    return judge(held, alive=alive, now=NOW, host="here", boot="boot", lease_timeout_s=LEASE_S, **facts).kind


@pytest.mark.parametrize("owner_host", ["here", "there"])
@pytest.mark.parametrize(("silence_s", "expected"), [(None, "held"), (1.0, "held"), (89.0, "held"), (91.0, "orphan")])
def test_a_foreign_flow_lives_as_long_as_it_is_heard_of(owner_host: str, silence_s: float | None, expected: str):
    """C130, C137: on a lost host; a flow of which nothing was ever heard counts as alive."""
    heard = None if silence_s is None else NOW - silence_s
    assert decide(record(owner_host), flow_heartbeat=heard) == expected


def test_a_flow_that_starts_anew_has_given_its_trainer_up():
    """The head did not answer it for long enough: nobody else may take over, but it may."""
    assert decide(record(), flow_heartbeat=NOW, starter=FLOW) == "orphan"
    assert decide(record("there"), flow_heartbeat=NOW, starter=FLOW) == "orphan"
    other = ProcessRef("flow", 20, 2, "far")
    assert decide(record(), flow_heartbeat=NOW, starter=other) == "held"


def test_silence_of_a_flow_does_not_matter_when_its_attempt_has_ended():
    assert decide(record(outcome={"status": "finished"}), flow_heartbeat=NOW - 1000) == "free"
    assert decide(record("there", heartbeat=NOW - 100), flow_heartbeat=NOW) == "silent"


def test_nothing_is_written_before_there_is_an_attempt(tmp_path: Path):
    """A start that is refused writes nothing into the run."""
    run = RunDir.at(tmp_path / "run")
    with FlowHeartbeat(run, 0.01) as heartbeat:
        heartbeat.heed({"event": "failed", "class": "held", "message": "held"})
    assert not run.root.exists()


def test_the_heartbeat_goes_on_until_the_flow_lets_go(tmp_path: Path):
    run = RunDir.at(tmp_path)
    run.attempts.mkdir()
    with FlowHeartbeat(run, 0.01) as heartbeat:
        heartbeat.heed({"event": "attempt_started", "attempt": 3})
        first = wait_for(lambda: flow_heartbeat(run, 3))
        later = wait_for(lambda: (beat := flow_heartbeat(run, 3)) and beat > first and beat)
    assert read_json(run.flow_heartbeat(3))["pid"] == os.getpid()
    assert [thread.name for thread in threading.enumerate() if thread.name == "flow-heartbeat"] == []
    assert flow_heartbeat(run, 3) >= later
    assert run.attempt_numbers() == [], "it is no attempt's record"


def test_a_start_here_takes_over_from_a_flow_that_is_silent_elsewhere(tmp_path: Path):
    """C130: a worker pod is lost without a word while its trainer trains on."""
    run = RunDir.at(tmp_path)
    first = Attempt.acquire(run, others=[FLOW], lease_timeout_s=LEASE_S, heartbeat_s=0.05)
    write_json(run.flow_heartbeat(1), FLOW.to_record() | {"heartbeat": time.time()})
    assert claim(run, 1, LEASE_S).kind == "held"
    write_json(run.flow_heartbeat(1), FLOW.to_record() | {"heartbeat": time.time() - LEASE_S - 5})
    second = Attempt.acquire(run, others=[], lease_timeout_s=LEASE_S, heartbeat_s=0.05)
    assert second.number == 2
    assert first.fenced.wait(10)
    first.close({"status": "fenced"})
    second.close({"status": "finished"})


def wait_for(condition: Any, timeout_s: float = 20) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found
