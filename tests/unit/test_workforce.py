"""Ending a worker ends what it started, also what hears nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller import workforce as workforce_module
from keepstep.controller.cluster import Cluster
from keepstep.controller.supervision import Supervisor
from keepstep.controller.workforce import Workforce
from keepstep.processes import hostname, start_time
from keepstep.run import RunDir


class FakeAttempt:
    number = 1

    def __init__(self) -> None:
        self.recorded: list[tuple[str, int | None, int]] = []

    def add_remote(self, ref: Any) -> None:
        self.recorded.append((ref.role, ref.rank, ref.pid))


def test_a_hung_engine_is_ended_with_its_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """All of them are in the attempt's record; a worker that is stopped would not notice the end of its engine."""
    engine, first, stopped = (subprocess.Popen(["sleep", "300"]) for _ in range(3))
    os.kill(stopped.pid, signal.SIGSTOP)
    workers = [(process.pid, start_time(process.pid)) for process in (first, stopped)]
    identity = {
        "pid": engine.pid, "start_time": start_time(engine.pid), "host": hostname(), "node_id": "here",
        "workers": workers,
    }  # fmt: skip
    actor = SimpleNamespace(
        build=SimpleNamespace(remote=lambda *_: "building"), _actor_id=SimpleNamespace(hex=lambda: "a" * 8)
    )
    attempt: Any = FakeAttempt()
    cluster = Cluster(load("quickstart"), RunDir.at(tmp_path), attempt, "cpu")
    supervisor = Supervisor(lambda: None)
    monkeypatch.setattr(cluster, "engine", lambda index: actor)
    monkeypatch.setattr(supervisor, "gather", lambda calls, timeout_s, what: [identity])
    monkeypatch.setattr(workforce_module.ray, "kill", lambda actor: None)
    workforce = Workforce(
        cluster, supervisor, specs=[], model_dir="", max_model_len=1, num_engines=1, engines_sleep=False, timeout_s=1
    )
    workforce.start_engine(0)
    assert workforce.engine(0) is actor
    assert attempt.recorded == [
        ("engine", 0, engine.pid), ("engine-worker", 0, first.pid), ("engine-worker", 0, stopped.pid),
    ]  # fmt: skip
    workforce.end("engine 0", actor)
    assert [process.wait(timeout=30) for process in (engine, first, stopped)] == [-signal.SIGKILL] * 3
