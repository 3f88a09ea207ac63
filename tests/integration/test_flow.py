"""The flow's wiring: events to task runs, retries, leaving. A stand-in trains; the Prefect server is a real one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keepstep.attempts import Attempt
from keepstep.config.schema import RunConfig
from keepstep.errors import (
    CheckpointError,
    ConfigError,
    HeldError,
    NoProgressError,
    Preempted,
    StorageError,
    WorkerDiedError,
)
from keepstep.retry_budget import RetryBudget
from keepstep.run import RunDir, read_json
from tests.unit import export_builder

if TYPE_CHECKING:
    from prefect.client.schemas import FlowRun

pytestmark = pytest.mark.integration

Event = dict[str, Any]
STATES_S = 20.0
OnEvent = Callable[[Event], None]


@pytest.fixture(scope="module", autouse=True)
def prefect_server() -> Iterator[None]:
    os.environ["DO_NOT_TRACK"] = "1"
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the flow with a stand-in for the trainer: `attempts` are its tries, in order."""
    import flows.grpo_train as module
    import tasks.training

    monkeypatch.setattr(module, "check_dataset", lambda config: None)
    monkeypatch.setattr(module, "preflight", lambda config: (40, None))
    monkeypatch.setattr(module, "plan_resume", lambda plan: None)

    def run(*attempts: Callable[[OnEvent, threading.Event], Event], **overrides: Any) -> Event:
        remaining = list(attempts)

        def run_trainer(_config: RunConfig, on_event: OnEvent, stop: threading.Event) -> Event:
            on_event({"event": "attempt_started", "attempt": len(attempts) - len(remaining) + 1})
            return remaining.pop(0)(on_event, stop)

        monkeypatch.setattr(tasks.training, "run_trainer", run_trainer)
        settings = {
            "trainer.output_dir": str(tmp_path / "run"),
            "trainer.total_training_steps": 40,
            "retry.delays_s": [0.1],
            "retry.jitter": 0.0,
        }
        result: Event = module.grpo_train("quickstart", settings | overrides)
        assert not remaining, "fewer tries than expected"
        return result

    return run


def result(final_step: int = 40, uploaded: int | None = 40) -> Event:
    return {
        "final_step": final_step, "target_step": 40, "final_checkpoint": "", "attempts": 1, "steps_trained": 40,
        "steps_lost": 0, "uploaded": uploaded, "reward_first10": 0.1, "reward_last10": 0.9, "wall_s": 1.0,
    }  # fmt: skip


def good(on_event: OnEvent, _stop: threading.Event) -> Event:
    for step in (20, 40):
        on_event({"event": "checkpoint_saved", "step": step})
        on_event({"event": "checkpoint_verified", "step": step})
    on_event({"event": "checkpoint_uploaded", "step": 40})
    return result()


def raising(error: Exception) -> Callable[[OnEvent, threading.Event], Event]:
    def attempt(_on_event: OnEvent, _stop: threading.Event) -> Event:
        raise error

    return attempt


def task_runs(*, named: str = "") -> dict[str, str]:
    """{name: state} of the newest flow run's task runs, once all are final and one is `named` so."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    deadline = time.monotonic() + STATES_S
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        only = FlowRunFilter(id=FlowRunFilterId(any_=[newest.id]))
        while True:
            # States travel as events and arrive a moment after the flow's own end.
            found = client.read_task_runs(flow_run_filter=only)
            final = bool(found) and all(run.state and run.state.is_final() for run in found)
            there = not named or any(run.name == named for run in found)
            if (final and there) or time.monotonic() > deadline:
                return {run.name: run.state_name or "" for run in found}
            time.sleep(0.2)


def newest_flow_run() -> FlowRun:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]


def flow_state() -> tuple[str, str]:
    """(type, name) of the newest flow run's state."""
    state = newest_flow_run().state
    assert state is not None
    return state.type.value, state.name or ""


def test_a_flow_run_is_named_after_its_folder_and_its_first_attempt(train, tmp_path: Path) -> None:
    train(good)
    assert newest_flow_run().name == "run-1"
    fourth = Attempt.acquire(RunDir.at(tmp_path / "run"), others=[], lease_timeout_s=1.0, heartbeat_s=1.0, at_least=4)
    fourth.close({"status": "finished", "step": 40})
    train(good)
    assert newest_flow_run().name == "run-5"


def test_every_save_and_upload_is_a_task_run_with_its_step(train) -> None:
    assert train(good)["final_step"] == 40
    found = task_runs()
    assert {name: found.get(name) for name in found if "step" in name} == {
        "verify-checkpoint-step-20": "Completed",
        "verify-checkpoint-step-40": "Completed",
        "upload-checkpoint-step-40": "Completed",
    }


def test_a_run_that_is_held_is_diagnosed_by_its_holder_alone(train, tmp_path: Path) -> None:
    """The doctor would tell how that one goes, on the page of a flow run that was refused."""
    from tests.unit import report_runs

    report_runs.preempted_often(tmp_path / "run")
    with pytest.raises(HeldError, match="is held by"):
        train(raising(HeldError("The run is held by somebody.")))
    assert flow_state() == ("FAILED", "NotRetryable")
    assert artifacts(key="diagnosis") == []
    with pytest.raises(ConfigError, match="not to be had"):
        train(raising(ConfigError("not to be had")))
    (page,) = artifacts(key="diagnosis")
    assert "worker_replaced" in page.data


def test_retryable_failure_is_tried_again_and_its_verification_ends(train) -> None:
    def lost(on_event: OnEvent, _stop: threading.Event) -> Event:
        on_event({"event": "checkpoint_saved", "step": 20})
        on_event({"event": "step", "step": 23, "total": 40, "reward": 0.5})
        raise WorkerDiedError("rank 1 died")

    def resumed(on_event: OnEvent, stop: threading.Event) -> Event:
        on_event({"event": "state_loaded", "attempt": 2, "step": 20, "sentences": []})
        return good(on_event, stop)

    assert train(lost, resumed)["final_step"] == 40
    name = "train_grpo attempt 2 from step 20, after worker_died, 3 steps lost"
    found = task_runs(named=name)
    assert found["upload-checkpoint-step-40"] == found[name] == "Completed"


def away(monkeypatch: pytest.MonkeyPatch, num_times: int) -> list[RunConfig]:
    """The checks before the first attempt find the store away so often; the configurations that they were given."""
    import flows.grpo_train as module

    asked: list[RunConfig] = []

    def preflight(config: RunConfig) -> tuple[int, None]:
        asked.append(config)
        if len(asked) <= num_times:
            raise StorageError("The object store does not answer.")
        return 40, None

    monkeypatch.setattr(module, "preflight", preflight)
    return asked


def test_a_store_that_is_away_at_the_start_is_asked_again(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """No automation brings a Failed flow run back, and a lost node's run begins with the store."""
    asked = away(monkeypatch, num_times=2)
    assert train(good)["final_step"] == 40
    assert len(asked) == 3


def test_a_store_that_stays_away_ends_the_start(train, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = away(monkeypatch, num_times=9)
    with pytest.raises(StorageError, match="does not answer"):
        train(**{"retry.max_retries": 2})
    assert len(asked) == 3
    assert flow_state() == ("FAILED", "RetriesExhausted")


def test_the_checkpoint_that_was_asked_for_is_not_gone_back_to_after_a_crash(
    train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same flow run is run again: what it had trained since must not be trained once more."""
    asked = away(monkeypatch, num_times=0)
    path = "/runs/mine/checkpoints/step_20"
    train(good, **{"trainer.resume_from_checkpoint": path})
    monkeypatch.setattr(RetryBudget, "has_resumed", True)
    train(good, **{"trainer.resume_from_checkpoint": path})
    assert [config.trainer.resume_from_checkpoint for config in asked] == [path, None]


def test_config_error_is_not_tried_again(train) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        train(raising(ConfigError("no such model")))
    assert flow_state() == ("FAILED", "NotRetryable")


def test_retries_end(train) -> None:
    with pytest.raises(NoProgressError, match="third"):
        train(
            raising(NoProgressError("first")), raising(NoProgressError("second")), raising(NoProgressError("third")),
            **{"retry.max_retries": 2},
        )  # fmt: skip
    assert flow_state() == ("FAILED", "RetriesExhausted")


def test_kills_do_not_use_up_the_retries(train) -> None:
    """C154: more kills from outside than `retry.max_retries`, and the run goes on."""
    killed = raising(WorkerDiedError("rank 1 died"))
    assert train(killed, killed, killed, killed, good, **{"retry.max_retries": 2})["final_step"] == 40


def test_a_failure_that_repeats_at_the_same_step_stops(train) -> None:
    with pytest.raises(NoProgressError, match="the reward hangs"):
        train(raising(NoProgressError("the reward hangs")), raising(NoProgressError("the reward hangs")))
    assert flow_state() == ("FAILED", "SameFailure")


def test_rejected_checkpoint_fails_its_task_run_and_not_the_flow(train) -> None:
    def rejected(on_event: OnEvent, stop: threading.Event) -> Event:
        on_event({"event": "checkpoint_saved", "step": 20})
        on_event({"event": "checkpoint_rejected", "step": 20, "reason": "actor/optimizer.pt: truncated"})
        on_event({"event": "checkpoint_saved", "step": 40})
        on_event({"event": "checkpoint_verified", "step": 40})
        on_event({"event": "checkpoint_uploaded", "step": 40})
        return result()

    train(rejected)
    found = task_runs()
    assert found["verify-checkpoint-step-20"] == "Failed"
    assert found["verify-checkpoint-step-40"] == "Completed"


def test_unconfirmed_last_upload_is_no_success(train) -> None:
    with pytest.raises(StorageError, match="confirmed step 20"):
        train(lambda on_event, stop: result(uploaded=20))


def test_being_asked_to_leave_reaches_the_trainer_once(train) -> None:
    """C155: the trainer is told, has time to save, and is not tried again."""
    seen = []
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]

    def until_asked(_on_event: OnEvent, stop: threading.Event) -> Event:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(stop.wait(timeout=20))
        raise Preempted("saved and left")

    try:
        with pytest.raises(KeyboardInterrupt):
            train(until_asked)
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    assert seen == [True]


def test_complete_run_does_nothing(train, tmp_path: Path) -> None:
    from keepstep.config.load import load, to_yaml
    from keepstep.preflight import contract
    from keepstep.run import RunDir, write_json

    run = RunDir.at(tmp_path / "run")
    config = load("quickstart", [f"trainer.output_dir={run.root}", "trainer.total_training_steps=40"])
    terms = contract.terms(config, model_fingerprint="x", total_steps=40)
    write_json(run.record, {"run_id": "a", "contract": terms, "dataset": {"num_rows": 640}})
    run.config.write_text(to_yaml(config))
    write_json(run.upload(40), {"step": 40})
    write_json(run.result, result())
    assert train()["final_step"] == 40


def artifacts(*, key: str) -> list[Any]:
    """Artifacts of the newest flow run with this key."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
        return client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[newest.id])),
        )


def trained(tmp_path: Path, told: Callable[[int], None] = lambda step: None) -> Callable[..., Event]:
    """A stand-in that leaves a run of 40 steps on disk and tells of them; `told` is called after each."""
    from tests.unit.report_runs import Story

    def attempt(on_event: OnEvent, stop: threading.Event) -> Event:
        story = Story(40)
        story.start()
        story.steps(1, 40)
        story.end("finished", step=40)
        story.write(tmp_path / "run")
        for event in story.events:
            on_event(event)
            if event["event"] == "step":
                told(event["step"])
        return good(on_event, stop)

    return attempt


def test_the_page_shows_where_the_run_stands(train, tmp_path: Path) -> None:
    from keepstep.run import RunDir
    from tasks.artifacts import key_of

    train(trained(tmp_path))
    key = key_of(RunDir.at(tmp_path / "run"))
    (page,) = artifacts(key=key)
    assert page.type == "markdown"
    assert page.data.startswith("**finished, at step 40 of 40")
    assert "![reward by step](data:image/svg+xml;base64," in page.data
    assert "| 1 | finished | 2026-03-01 12:00:00 |" in page.data and "tensorboard --logdir" in page.data
    (progress,) = artifacts(key=f"{key}-steps")
    assert (progress.type, progress.data, progress.description) == ("progress", 100.0, "step 40 of 40")


def test_the_page_is_kept_up_to_date_in_place(train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One artifact per flow run: seen at step 10 while the trainer waits, and again at the end."""
    import tasks.artifacts as module
    from keepstep.run import RunDir

    key = module.key_of(RunDir.at(tmp_path / "run"))
    seen = []

    def look(step: int) -> None:
        if step == 10:
            deadline = time.monotonic() + STATES_S
            while not seen and time.monotonic() < deadline:
                seen.extend(artifacts(key=f"{key}-steps"))
                time.sleep(0.1)

    monkeypatch.setattr(module, "INTERVAL_S", 0.1)
    monkeypatch.setattr(module, "MOST_TIME_SHARE", 1.0)
    train(trained(tmp_path, look))
    assert 0 < seen[0].data <= 25.0
    (progress,) = artifacts(key=f"{key}-steps")
    assert progress.id == seen[0].id and progress.data == 100.0
    assert len(artifacts(key=key)) == 1


def test_an_api_that_does_not_answer_holds_no_step_up(train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the page hangs until the flow has ended; all steps are told and the flow ends all the same."""
    import tasks.artifacts as module

    answered, asked = threading.Event(), threading.Event()

    given_up: list[bool] = []

    def hang(*_: Any, **__: Any) -> None:
        asked.set()
        # Bounded, so that a flow that waits for it fails here instead of hanging.
        if not answered.wait(60):
            given_up.append(True)

    for name in ("create_markdown_artifact", "create_progress_artifact", "update_progress_artifact"):
        monkeypatch.setattr(module, name, hang)
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    steps: list[int] = []

    def told(step: int) -> None:
        if step == 1:
            assert asked.wait(STATES_S)
        steps.append(step)

    try:
        assert train(trained(tmp_path, told))["final_step"] == 40
        assert steps == list(range(1, 41)) and not answered.is_set() and not given_up
    finally:
        answered.set()


def test_the_resume_decision_is_a_table(prefect_server: None) -> None:
    import json

    from prefect import flow

    from keepstep.checkpoint.plan import Rejection, ResumePlan
    from keepstep.checkpoint.select import Candidate
    from tasks.resume import plan_resume

    candidates = [Candidate(100, "local"), Candidate(100, "s3"), Candidate(120, "local")]
    plan = ResumePlan(
        100, "s3", "newest multiple of 100", 120, 20,
        rejections=[Rejection(100, "local", "actor/optimizer.pt: truncated")], candidates=candidates,
    )  # fmt: skip

    @flow
    def decide() -> int | None:
        return plan_resume(plan)

    assert decide() == 100
    (table,) = artifacts(key="resume-decision")
    rows = json.loads(table.data)
    assert [(row["step"], row["where"], row["verdict"]) for row in rows] == [
        ("100", "local", "rejected"),
        ("100", "s3", "chosen"),
        ("120", "local", "not needed"),
    ]
    assert rows[0]["why"] == "actor/optimizer.pt: truncated" and "20 steps given up" in rows[1]["why"]


def test_the_last_step_is_exported_where_it_is_asked_for(train, tmp_path: Path) -> None:
    """Into the run's folder, as a model that loads; without a checkpoint the run is done, and why not is said."""
    with pytest.raises(CheckpointError, match="The run is done, but its export failed"):
        train(good, **{"export.enable": True})
    assert flow_state() == ("FAILED", "NotRetryable")
    base = export_builder.write_base(tmp_path / "Tiny-Qwen3", export_builder.tiny_model(seed=1))
    export_builder.write_checkpoint(tmp_path, export_builder.tiny_model(seed=2), base, step=40)
    found = train(good, **{"export.enable": True, "export.dtype": "bfloat16"})
    assert found["export"] == str(tmp_path / "run" / "export" / "step_40")
    assert read_json(Path(found["export"]) / "config.json")["dtype"] == "bfloat16"
    assert (Path(found["export"]) / "model.safetensors").is_file()
