"""Whether an attempt must leave because nodes are going to be taken away: the decision, and the thread that acts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller import draining
from keepstep.controller.cluster import Cluster
from keepstep.controller.draining import DrainWatch, affected
from keepstep.run import RunDir

NOW = 1000.0
WORKERS = {"a" * 40: ["rank 0", "engine 0"], "b" * 40: ["rank 1"], "c" * 40: ["controller"]}


@pytest.mark.parametrize(
    ("drained", "reason", "grace_s"),
    [
        ({}, None, None),
        ({"d" * 40: NOW + 60}, None, None),
        ({"b" * 40: None}, "draining: node bbbbbbbb with rank 1", None),
        ({"b" * 40: NOW + 60}, "draining: node bbbbbbbb with rank 1", 60.0),
        ({"b" * 40: NOW - 5}, "draining: node bbbbbbbb with rank 1", draining.LEAST_GRACE_S),
        ({"c" * 40: NOW + 9}, "draining: node cccccccc with controller", 9.0),
        (
            {"a" * 40: NOW + 60, "b" * 40: NOW + 40, "d" * 40: NOW + 1},
            "draining: node aaaaaaaa with rank 0, engine 0; node bbbbbbbb with rank 1",
            40.0,
        ),
        ({"a" * 40: None, "b" * 40: NOW + 40},
         "draining: node aaaaaaaa with rank 0, engine 0; node bbbbbbbb with rank 1", 40.0),
    ],
)  # fmt: skip
def test_who_must_leave(drained: dict[str, float | None], reason: str | None, grace_s: float | None):
    """C130: only nodes with workers of ours count, and of their deadlines the first."""
    notice = affected(drained, WORKERS, NOW)
    assert (notice and notice.reason, notice and notice.grace_s) == (reason, grace_s)


class Fake:
    """A cluster, an event log and somebody to be asked to leave."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float | None]] = []
        self.told: list[str] = []
        self.left = threading.Event()

    def by_node(self) -> dict[str, list[str]]:
        return WORKERS

    def emit(self, event: str, **_: Any) -> None:
        self.told.append(event)

    def ask(self, reason: str, grace_s: float | None = None) -> None:
        self.asked.append((reason, grace_s))
        self.left.set()


def test_the_watch_outlasts_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    """First no answer, then a foreign node, then one of ours: the attempt is asked to leave once."""
    answers: list[Any] = [ConnectionError("no head"), {"d" * 40: None}, {"b" * 40: None}]

    def next_answer() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(draining, "draining_nodes", next_answer)
    monkeypatch.setattr(draining, "POLL_S", 0.001)
    fake: Any = Fake()
    watch = DrainWatch(fake, fake, fake)
    watch.start()
    assert fake.left.wait(20)
    watch.stop()
    assert fake.asked == [("draining: node bbbbbbbb with rank 1", None)]
    assert fake.told == ["node_draining"] and answers == []


def test_a_watch_that_was_never_started_can_be_stopped():
    fake: Any = Fake()
    DrainWatch(fake, fake, fake).stop()


class FakeAttempt:
    number = 1

    def add_remote(self, ref: Any) -> None:
        pass


def test_what_was_replaced_stands_where_its_successor_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A node from which everything was moved may go; a spare, which holds nothing, may go with any node."""
    attempt: Any = FakeAttempt()
    cluster = Cluster(load("quickstart"), RunDir.at(tmp_path), attempt, "cpu")
    monkeypatch.setattr(cluster, "own_node_id", lambda: "head")
    for role, rank, node_id in [
        ("rank", 0, "one"), ("rank", 1, "two"), ("engine", 0, "one"), ("writer", 0, "head"),
        ("spare", None, "three"), ("rank", 1, "three"),
    ]:  # fmt: skip
        cluster.record(role, rank, {"pid": 1, "start_time": 1, "host": "h", "node_id": node_id})
    assert cluster.by_node() == {
        "one": ["rank 0", "engine 0"], "three": ["rank 1"], "head": ["writer 0", "controller"],
    }  # fmt: skip
