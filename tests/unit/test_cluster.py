"""Starting a local Ray on a machine that is too busy for Ray's own limit."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller import cluster as cluster_module
from keepstep.controller.cluster import RAY_WAITED, Cluster
from keepstep.errors import FencedError, NoProgressError
from keepstep.processes import ProcessRef
from keepstep.run import RunDir

LATE = Exception(f"The current node {RAY_WAITED}. This could happen because …")


class FakeAttempt:
    number = 1

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.fenced = False

    def check(self) -> None:
        if self.fenced:
            raise FencedError("A newer attempt took the run over.")

    def processes(self) -> list[ProcessRef]:
        return [ref for pid in self.recorded if (ref := ProcessRef.of(pid, "ray")) is not None]

    def add(self, pid: int, role: str) -> None:
        if ProcessRef.of(pid, role) is not None:
            self.recorded.append(pid)


class FakeRay:
    """Leaves a process behind, whether it comes up or not."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.started: list[subprocess.Popen[bytes]] = []

    def init(self, **_: Any) -> None:
        self.started.append(subprocess.Popen(["sleep", "300"]))
        time.sleep(0.01)
        if self.failures:
            raise self.failures.pop(0)

    def shutdown(self) -> None: ...


@pytest.fixture
def attempt() -> FakeAttempt:
    return FakeAttempt()


def start(attempt: Any, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timeout_s: float = 60) -> None:
    monkeypatch.setattr(cluster_module, "ray", ray)
    config = load("quickstart", [f"timeouts.start_s={timeout_s}"])
    run = RunDir.at(tmp_path)
    try:
        Cluster(config, run, attempt, "cpu").start()
    finally:
        subprocess.run(["rm", "-rf", str(run.temporary(1))], check=True)


def test_a_ray_that_was_too_late_is_started_again_and_its_processes_are_ended(
    attempt: FakeAttempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    ray = FakeRay([LATE, LATE])
    start(attempt, ray, monkeypatch, tmp_path)
    first, second, third = ray.started
    assert first.wait(timeout=5) < 0 and second.wait(timeout=5) < 0 and third.poll() is None
    assert attempt.recorded == [third.pid]
    third.kill()
    third.wait()


@pytest.mark.parametrize(
    ("failure", "timeout_s"), [(LATE, 0.001), (ValueError("bad object store size\nmore"), 60)], ids=["late", "other"]
)
def test_it_is_not_tried_beyond_the_limit_or_where_that_would_not_help(
    attempt: FakeAttempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception, timeout_s: float
):
    ray = FakeRay([failure] * 9)
    with pytest.raises(NoProgressError, match="Ray did not start here: ") as raised:
        start(attempt, ray, monkeypatch, tmp_path, timeout_s)
    assert len(ray.started) == 1 and "\n" not in raised.value.message
    ray.started[0].kill()
    ray.started[0].wait()


def test_who_lost_the_run_meanwhile_does_not_try_again(
    attempt: FakeAttempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    attempt.fenced = True
    ray = FakeRay([LATE])
    with pytest.raises(FencedError):
        start(attempt, ray, monkeypatch, tmp_path)
    assert len(ray.started) == 1
    ray.started[0].kill()
    ray.started[0].wait()
