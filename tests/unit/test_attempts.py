"""Who may write into a run: the decision as a table, the lease as files and real processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keepstep.attempts import Attempt, check_fence, end_attempt, flow_run_of, judge
from keepstep.errors import ConfigError, FencedError, HeldError
from keepstep.events.log import EventLog
from keepstep.processes import ProcessRef, start_time
from keepstep.run import RunDir, read_json, write_json

HOST, BOOT, NOW = "here", "boot-1", 1000.0
OWNER, FLOW = 10, 20


def record(**changes: Any) -> dict[str, Any]:
    values = {
        "attempt": 3,
        "owner": {"host": HOST, "pid": OWNER, "start_time": 1, "boot_id": BOOT},
        "heartbeat": NOW - 1,
        "outcome": None,
        "processes": [],
    }
    return values | changes


def flow(host: str = HOST) -> dict[str, Any]:
    return {"role": "flow", "pid": FLOW, "start_time": 1, "host": host, "rank": None}


def owner(**changes: Any) -> dict[str, Any]:
    return {"host": HOST, "pid": OWNER, "start_time": 1, "boot_id": BOOT} | changes


def test_the_holder_is_named_as_people_know_it():
    held = record(processes=[flow()])
    known: dict[str, Any] = {
        "alive": lambda _: True, "now": NOW, "host": HOST, "boot": BOOT, "lease_timeout_s": 90
    }  # fmt: skip
    claim = judge(held, **known, flow_run=lambda: "brave-otter")
    assert claim.reason == (
        f"attempt 3 runs on this host as process {OWNER}, started by flow run brave-otter, process {FLOW} on {HOST}"
    )
    claim = judge(held, **known)
    assert claim.reason.endswith(f", started by process {FLOW} on {HOST}")


def test_the_name_of_a_flow_run_is_told_by_the_first_event_of_its_attempt(tmp_path: Path):
    run = RunDir.at(tmp_path)
    assert flow_run_of(run, 1) is None
    for number, fields in ((1, {"flow_run": "brave-otter"}), (2, {}), (3, {"flow_run": "calm-heron"})):
        log = EventLog(run.events, number)
        log.emit("attempt_started", **fields)
        log.emit("step", step=number)
        log.close()
    assert [flow_run_of(run, number) for number in (1, 2, 3, 4)] == ["brave-otter", None, "calm-heron", None]


@pytest.mark.parametrize(
    ("held_record", "alive", "expected"),
    [
        (None, set(), "free"),
        (record(outcome={"status": "finished"}), {OWNER}, "free"),
        (record(), set(), "dead"),
        (record(), {OWNER}, "held"),
        (record(owner=owner(boot_id="boot-0")), {OWNER}, "dead"),
        (record(owner=owner(start_time=2)), {OWNER}, "dead"),
        (record(processes=[flow()]), {OWNER, FLOW}, "held"),
        (record(processes=[flow()]), {OWNER}, "orphan"),
        (record(processes=[flow("elsewhere")]), {OWNER}, "held"),
        (record(owner=owner(host="elsewhere")), set(), "held"),
        (record(owner=owner(host="elsewhere"), heartbeat=NOW - 89), set(), "held"),
        (record(owner=owner(host="elsewhere"), heartbeat=NOW - 91), set(), "silent"),
    ],
)
def test_who_holds_the_run(held_record: dict[str, Any] | None, alive: set[int], expected: str):
    """C127, C139, C140: pid, start time and boot decide here; silence decides for other hosts."""

    def lives(ref: ProcessRef) -> bool:
        return ref.pid in alive and ref.start_time == 1

    claim = judge(held_record, alive=lives, now=NOW, host=HOST, boot=BOOT, lease_timeout_s=90)
    assert claim.kind == expected
    assert claim.open == (expected != "held")


def acquire(run: RunDir, **changes: Any) -> Attempt:
    options: dict[str, Any] = {"others": [], "lease_timeout_s": 90, "heartbeat_s": 0.05} | changes
    return Attempt.acquire(run, **options)


def test_second_attempt_is_refused_while_the_first_lives(tmp_path: Path):
    run = RunDir.at(tmp_path)
    first = acquire(run)
    with pytest.raises(HeldError, match="attempt 1 runs on this host"):
        acquire(run)
    first.close({"status": "finished"})
    second = acquire(run)
    assert second.number == 2
    second.close({"status": "finished"})


def test_of_many_starts_at_once_one_gets_the_number(tmp_path: Path):
    run = RunDir.at(tmp_path)

    def start(_: int) -> Attempt | None:
        try:
            return acquire(run)
        except HeldError:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [attempt for attempt in pool.map(start, range(8)) if attempt]
    assert [attempt.number for attempt in won] == [1]
    won[0].close({"status": "finished"})


def test_numbers_go_on_from_what_the_store_remembers(tmp_path: Path):
    attempt = acquire(RunDir.at(tmp_path), at_least=8)
    assert attempt.number == 8
    attempt.close({"status": "finished"})


def test_heartbeat_is_written_and_a_newer_number_fences(tmp_path: Path):
    """C146: the highest number owns the run; the older attempt notices and writes nothing more."""
    run = RunDir.at(tmp_path)
    attempt = acquire(run)
    before = read_json(run.attempt(1))["heartbeat"]
    write_json(run.attempt(2), record(attempt=2))
    assert attempt.fenced.wait(5)
    with pytest.raises(FencedError, match="attempt 2 took the run over"):
        attempt.check()
    attempt.close({"status": "finished"})
    assert read_json(run.attempt(1))["outcome"] is None
    assert read_json(run.attempt(1))["heartbeat"] >= before
    check_fence(run, 2)


def test_short_lived_processes_that_are_gone_make_room(tmp_path: Path):
    """A run verifies thousands of saves, and its record is written every other second."""
    run = RunDir.at(tmp_path)
    attempt = acquire(run)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        attempt.add(process.pid, "verifier")
        process.kill()
        process.wait()
    assert [one["role"] for one in read_json(run.attempt(1))["processes"]] == ["controller", "verifier"]
    attempt.close({"status": "finished"})


def test_a_filesystem_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(_source: str, _target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="without hard links"):
        acquire(RunDir.at(tmp_path))


def test_an_attempt_whose_folder_was_removed_stops_and_brings_nothing_back(tmp_path: Path):
    run = RunDir.at(tmp_path / "run")
    attempt = Attempt.acquire(run, others=[], lease_timeout_s=1, heartbeat_s=0.05)
    shutil.rmtree(run.root)
    assert attempt.fenced.wait(5)
    with pytest.raises(FencedError, match="removed or moved"):
        attempt.check()
    attempt.add_remote(ProcessRef.current("rank"))
    attempt.close({"status": "failed"})
    assert not run.root.exists()


def test_leftovers_are_ended_by_their_record_and_nothing_else(tmp_path: Path):
    """C158: the process with the recorded pid and start time; a reused pid is left alone, and so are servers."""
    run = RunDir.at(tmp_path)
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    leftover, reused, server = sleepers
    refs = [
        ProcessRef("rank", leftover.pid, start_time(leftover.pid) or 0, ProcessRef.current("x").host),
        ProcessRef("rank", reused.pid, (start_time(reused.pid) or 0) + 1, ProcessRef.current("x").host),
        ProcessRef("object-store", server.pid, start_time(server.pid) or 0, ProcessRef.current("x").host),
    ]
    write_json(run.attempt(1), record(processes=[ref.to_record() for ref in refs]))
    try:
        assert [ref.pid for ref in end_attempt(run, 1)] == [leftover.pid]
        assert leftover.wait(timeout=5) != 0
        assert reused.poll() is None and server.poll() is None
    finally:
        for process in sleepers:
            process.kill()
            process.wait()
