"""Following a Ray job: a head that is away for a moment, one that forgot the job, one that never answers again."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller import launch
from keepstep.errors import NoProgressError


class Status(str):
    def is_terminal(self) -> bool:
        return self == "SUCCEEDED"


class FakeClient:
    """A job server that gives these answers, one a request: (status, the whole log), or an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.submitted: list[str] = []
        self.stopped: list[str] = []

    def get_job_status(self, job: str) -> Status:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, self.log = answer
        return Status(status)

    def get_job_logs(self, job: str) -> str:
        return self.log

    def submit_job(self, *, submission_id: str, **_: Any) -> str:
        self.submitted.append(submission_id)
        return submission_id

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "JOB_POLL_S", 0.001)
    monkeypatch.setattr(launch, "HEAD_PATIENCE_S", 3600.0)


def lines(client: FakeClient) -> list[str]:
    return list(launch._job_lines(client, "job", threading.Event()))


def test_every_line_comes_once_although_the_head_is_away_for_a_moment():
    client = FakeClient(
        ("RUNNING", "one\ntw"),
        ConnectionError("refused"),
        RuntimeError("Request failed with status code 500: no agent."),
        ("RUNNING", "one\ntwo\nthree\n"),
        ("SUCCEEDED", "one\ntwo\nthree\nfour"),
    )
    assert lines(client) == ["one", "two", "three", "four"]


def test_a_head_that_forgot_the_job_is_believed_at_once():
    """C148: another head at the same address knows nothing of it."""
    client = FakeClient(("RUNNING", ""), RuntimeError("Request failed with status code 404: Job job does not exist."))
    with pytest.raises(RuntimeError, match="404"):
        lines(client)


def test_a_head_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "HEAD_PATIENCE_S", 0.0)
    with pytest.raises(ConnectionError):
        lines(FakeClient(("RUNNING", ""), *[ConnectionError("refused")] * 100))


def follow(monkeypatch: pytest.MonkeyPatch, client: FakeClient, tmp_path: Any, limit_s: float = 3600.0) -> dict:
    config = load("quickstart", ["ray.address=http://head:8265", f"trainer.output_dir={tmp_path}/run"])
    monkeypatch.setattr(launch, "_submit_job", lambda *_: (client, "job"))
    longest_s = launch.WAITS_OF_A_START * config.timeouts.start_s
    monkeypatch.setattr(launch, "SILENCE_MARGIN_S", limit_s - longest_s)
    return launch._run_job(config, lambda _: None, threading.Event())


def test_a_lost_cluster_is_named_and_worth_another_attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """C148: who starts it again needs to know which cluster."""
    monkeypatch.setattr(launch, "HEAD_PATIENCE_S", 0.0)
    found = follow(monkeypatch, FakeClient(("RUNNING", ""), *[ConnectionError("refused")] * 100), tmp_path)
    assert (found["class"], found["retry"]) == ("worker_died", True)
    assert "http://head:8265 does not answer" in found["message"]


def test_how_an_attempt_ended_is_known_although_its_head_went_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(launch, "HEAD_PATIENCE_S", 0.0)
    said = launch.EVENT_PREFIX + json.dumps({"event": "preempted", "class": "preempted", "message": "m"}) + "\n"
    found = follow(monkeypatch, FakeClient(("RUNNING", said), *[ConnectionError("refused")] * 100), tmp_path)
    assert found["event"] == "preempted"


def test_a_job_of_which_nothing_is_heard_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """C148: its status says RUNNING for ever."""
    client = FakeClient(*[("RUNNING", "")] * 100_000)
    found = follow(monkeypatch, client, tmp_path, limit_s=0.05)
    assert (found["class"], found["retry"]) == ("no_progress", True)
    assert client.stopped == ["job"]
    assert not (tmp_path / "run").exists()


def test_a_job_that_was_taken_without_an_answer_is_not_submitted_twice(monkeypatch: pytest.MonkeyPatch):
    unknown = RuntimeError("Request failed with status code 404.")
    clients = [ConnectionError("no head yet"), FakeClient(unknown), FakeClient(("PENDING", ""))]

    def client(_: str) -> Any:
        answer = clients.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if len(clients) == 1:
            monkeypatch.setattr(answer, "submit_job", lose_the_answer)
        return answer

    def lose_the_answer(**_: Any) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(launch, "_job_client", client)
    config = load("quickstart", ["ray.address=http://head:8265"])
    _, job = launch._submit_job(config, "train", {})
    assert job.startswith("keepstep-") and clients == []


def test_a_cluster_that_takes_no_job_is_named(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: str) -> Any:
        raise ConnectionError("refused")

    monkeypatch.setattr(launch, "_job_client", refuse)
    config = load("quickstart", ["ray.address=http://head:8265", "timeouts.start_s=0.01"])
    with pytest.raises(NoProgressError, match="http://head:8265 took no job within"):
        launch._submit_job(config, "train", {})
