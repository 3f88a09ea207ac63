"""The flow's wiring: events to task runs, retries, leaving. A stand-in trains; the Prefect server is a real one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError, NoProgressError, Preempted, WorkerDiedError

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
            final = all(run.state and run.state.is_final() for run in found)
            there = not named or any(run.name == named for run in found)
            if (final and there) or time.monotonic() > deadline:
                return {run.name: run.state_name or "" for run in found}
            time.sleep(0.2)


def flow_state() -> tuple[str, str]:
    """(type, name) of the newest flow run's state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        state = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0].state
        assert state is not None
        return state.type.value, state.name or ""


def test_every_save_and_upload_is_a_task_run_with_its_step(train) -> None:
    assert train(good)["final_step"] == 40
    found = task_runs()
    assert {name: found.get(name) for name in found if "step" in name} == {
        "verify-checkpoint-step-20": "Completed",
        "verify-checkpoint-step-40": "Completed",
        "upload-checkpoint-step-40": "Completed",
    }


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
    from keepstep.errors import StorageError

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
