"""`keepstep ps`: processes that are really there, gone, or on another host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from keepstep.attempts import MARK_VARIABLE, mark
from keepstep.cli.main import main
from keepstep.processes import ProcessRef, boot_id, hostname
from keepstep.run import RunDir, write_json


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started and waits: it grows no more."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    yield process
    process.kill()
    process.wait()


def ended_process() -> ProcessRef:
    """One that was here and is gone."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ref = ProcessRef.of(process.pid, "rank", 1)
    process.kill()
    process.wait()
    assert ref is not None
    return ref


def run_with(folder: Path, *refs: ProcessRef, outcome: Any = None) -> RunDir:
    run = RunDir.at(folder / "run")
    owner = ProcessRef.current("controller")
    write_json(run.record, {"run_id": "a"})
    write_json(run.attempt(2), {
        "attempt": 2,
        "owner": {"host": owner.host, "pid": owner.pid, "start_time": owner.start_time, "boot_id": boot_id()},
        "heartbeat": time.time() - 2,
        "outcome": outcome,
        "processes": [ref.to_record() for ref in (owner, *refs)],
    })  # fmt: skip
    return run


def told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["ps", str(run.root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_living_gone_and_elsewhere(tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys):
    rank = ProcessRef.of(sleeper.pid, "rank", 0)
    assert rank is not None
    elsewhere = ProcessRef("engine", 4711, 1, "another-host", 0)
    run = run_with(tmp_path, rank, ended_process(), elsewhere)
    found = told(run, capsys)
    assert (found["attempt"], found["state"]) == (2, "held")
    by_role = {(worker["role"], worker["rank"]): worker for worker in found["processes"]}
    assert {key: worker["alive"] for key, worker in by_role.items()} == {
        ("controller", None): True,
        ("rank", 0): True,
        ("rank", 1): False,
        ("engine", 0): None,
    }
    assert by_role["rank", 0]["pid"] == sleeper.pid and by_role["rank", 0]["host"] == hostname()
    assert 2 <= by_role["controller", None]["heard_s"] < 60


def test_memory_and_age_are_the_kernels(tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys):
    """Against /proc/<pid>/status, and the clock: it was started a moment ago."""
    rank = ProcessRef.of(sleeper.pid, "rank", 0)
    assert rank is not None
    worker = next(w for w in told(run_with(tmp_path, rank), capsys)["processes"] if w["role"] == "rank")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{sleeper.pid}/status").read_text().splitlines())
    assert worker["memory_bytes"] == pytest.approx(int(status["VmRSS"].split()[0]) * 1024, rel=0.1)
    assert datetime.fromisoformat(worker["since"]).timestamp() == pytest.approx(time.time(), abs=60)


def test_a_pid_that_another_process_has_now_is_gone(tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys):
    reused = ProcessRef("rank", sleeper.pid, 1, hostname(), 0)
    worker = next(w for w in told(run_with(tmp_path, reused), capsys)["processes"] if w["role"] == "rank")
    assert worker["alive"] is False and worker["memory_bytes"] is None


def test_what_an_earlier_attempt_left_is_named(tmp_path: Path, capsys):
    """A child that no record names, known by the mark that it inherited."""
    run = run_with(tmp_path)
    write_json(run.attempt(1), {"attempt": 1, "processes": []})
    environment = os.environ | {MARK_VARIABLE: mark(run, 1)}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        left = [worker for worker in told(run, capsys)["processes"] if worker["attempt"] is None]
    finally:
        process.kill()
        process.wait()
    assert [(worker["pid"], worker["alive"]) for worker in left] == [(process.pid, True)]


def test_a_flow_on_another_host_is_known_by_its_heartbeat(tmp_path: Path, capsys):
    run = run_with(tmp_path)
    flow = ProcessRef("flow", 9, 1, "head-node").to_record()
    write_json(run.flow_heartbeat(2), flow | {"heartbeat": time.time() - 5})
    worker = next(w for w in told(run, capsys)["processes"] if w["role"] == "flow")
    assert worker["alive"] is None and 5 <= worker["heard_s"] < 60


def test_the_table_for_a_person(tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys):
    rank = ProcessRef.of(sleeper.pid, "rank", 0)
    assert rank is not None
    gone = ended_process()
    assert main(["ps", str(run_with(tmp_path, rank, gone).root)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert f"attempt 2 runs on this host as process {os.getpid()}" in head
    assert columns.split() == ["attempt", "role", "rank", "pid", "host", "alive", "since", "memory", "heard"]
    assert any(line.split()[:4] == ["2", "rank", "0", str(sleeper.pid)] for line in rows)
    assert rows[-1] == f"gone: rank 1 ({gone.pid})"


def test_of_an_ended_attempt_nobody_is_missed(tmp_path: Path, capsys):
    run = run_with(tmp_path, ProcessRef("rank", 4, 1, "another-host", 0), outcome={"status": "finished"})
    assert main(["ps", str(run.root)]) == 0
    printed = capsys.readouterr().out
    assert "attempt 2 ended: finished" in printed and "rank" not in printed and "gone" not in printed


def test_before_the_first_attempt_and_without_a_run(tmp_path: Path, capsys):
    run = RunDir.at(tmp_path / "run")
    write_json(run.record, {"run_id": "a"})
    assert main(["ps", str(run.root)]) == 0
    assert "no earlier attempt" in capsys.readouterr().out
    assert main(["ps", str(tmp_path)]) == 2
