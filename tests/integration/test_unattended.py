"""`keepstep up`, and what dies afterwards: the same flow run goes on by itself, with the files of `deployments/`.

The window of silence is scaled to `SILENCE_S`; what is killed is found in the run's own record of its attempt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.verify import verify
from keepstep.config.load import load, to_yaml
from keepstep.platform import guard, local, servers
from keepstep.platform.api import PrefectApi
from keepstep.preflight import contract
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json, write_json
from tests.integration.driver import REPOSITORY, Driver, clean_environment, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HEARTBEAT_S = 30
"""Prefect takes no shorter one."""
SILENCE_S = 75
PATIENCE_S = 600.0
"""For each wait, on a machine that is busy with other things as well."""
Record = dict[str, Any]

COMPLETE = {"trainer.total_training_steps": 40}
"""Of the run of the fixture `complete`."""


@dataclass
class Platform:
    """A folder of runs with `keepstep up` and what it started."""

    folder: Path

    def keepstep(self, command: str) -> str:
        """Standard output of `keepstep <command> <folder>`."""
        environment = {**clean_environment(), "KEEPSTEP_SILENCE_S": str(SILENCE_S)}
        arguments = [sys.executable, "-m", "keepstep.cli.main", command, str(self.folder)]
        done = subprocess.run(
            arguments, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def platform(self) -> Path:
        return self.folder / ".keepstep"

    @property
    def api(self) -> PrefectApi:
        record = guard.read_record(guard.record_path(self.platform, servers.PREFECT_SERVER))
        assert record is not None
        return PrefectApi(f"{record['url']}/api")

    def processes(self) -> list[ProcessRef]:
        """Servers, worker and their guards."""
        records = [guard.read_record(guard.record_path(self.platform, r)) for r in (*servers.ROLES, local.WORKER)]
        return [ProcessRef.from_record(record[key]) for record in records if record for key in ("server", "guard")]

    def worker(self) -> ProcessRef:
        record = guard.read_record(guard.record_path(self.platform, local.WORKER))
        assert record is not None
        return ProcessRef.from_record(record["server"])

    def start(self, run: RunDir, overrides: Record, job_variables: Record | None = None, **fields: Any) -> str:
        """Id of a new flow run of the deployment on this run's folder."""
        deployment = self.api.ask("GET", "deployments/name/grpo-train/quickstart")
        # Of all that a deployment sets, a flow run's own job variables replace `env` as a whole.
        env = {"PREFECT_CLIENT_MAX_RETRIES": "8", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
        body = {
            "parameters": {"overrides": {**overrides, "trainer.output_dir": str(run.root)}},
            "job_variables": {"env": env, **(job_variables or {})},
            **fields,
        }
        created: Record = self.api.ask("POST", f"deployments/{deployment['id']}/create_flow_run", body)
        return str(created["id"])

    def set_state(self, flow_run: str, state_type: str) -> None:
        self.api.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": {"type": state_type}, "force": True})

    def flow_run(self, flow_run: str) -> Record:
        found: Record = self.api.ask("GET", f"flow_runs/{flow_run}")
        return found

    def states(self, flow_run: str) -> list[str]:
        """Names of the states that a flow run was in, the first one first; not those between Pending and Running."""
        found = self.api.ask("GET", f"flow_run_states/?flow_run_id={flow_run}")
        names = [state["name"] for state in sorted(found, key=lambda state: state["timestamp"])]
        return [name for name in names if name not in ("Late", "Submitting")]

    def wait_for(self, flow_run: str, what: str, condition: Callable[[Record], Any]) -> Record:
        """The flow run as soon as `condition` holds for it."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition(found := self.flow_run(flow_run)):
            log = guard.log_path(self.platform, local.WORKER).read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, f"not {what} but {self.states(flow_run)}\n{log}"
            time.sleep(0.5)
        return found

    def wait_for_state(self, flow_run: str, name: str) -> Record:
        return self.wait_for(flow_run, name, lambda found: found["state"]["name"] == name)


@dataclass
class Strays:
    """Flow runs that a worker had taken, or was cancelling, when it died."""

    pending: str
    cancelling: str


@pytest.fixture(scope="module")
def platform(workspace: Path) -> Iterator[Platform]:
    """A platform that is up; at the end it is taken down, and nothing may be left of it."""
    platform = Platform(workspace / "unattended")
    platform.keepstep("up")
    try:
        yield platform
    finally:
        processes = platform.processes()
        platform.keepstep("down")
    assert [ref for ref in processes if ref.alive()] == []


@pytest.fixture(scope="module")
def strays(platform: Platform, complete: RunDir) -> Strays:
    """They are looked at last, when the window of silence is long over."""
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    unscheduled = {"state": {"type": "SCHEDULED", "state_details": {"scheduled_time": tomorrow}}}
    pending, cancelling = (platform.start(complete, COMPLETE, **unscheduled) for _ in range(2))
    platform.set_state(pending, "PENDING")
    platform.set_state(cancelling, "RUNNING")
    platform.set_state(cancelling, "CANCELLING")
    assert platform.flow_run(cancelling)["state"]["name"] == "Cancelling"
    return Strays(pending, cancelling)


@pytest.fixture(scope="module")
def complete(platform: Platform) -> RunDir:
    """A run that has reached its end: a flow on it says so and trains nothing."""
    run = RunDir.at(platform.folder / "complete")
    config = load("quickstart", [f"trainer.output_dir={run.root}", "trainer.total_training_steps=40"])
    terms = contract.terms(config, model_fingerprint="x", total_steps=40)
    write_json(run.record, {"run_id": "a", "contract": terms, "dataset": {"num_rows": 640}})
    run.config.write_text(to_yaml(config))
    write_json(run.upload(40), {"step": 40})
    write_json(run.result, {
        "final_step": 40, "target_step": 40, "final_checkpoint": "", "attempts": 1, "steps_trained": 40,
        "steps_lost": 0, "uploaded": 40, "reward_first10": 0.1, "reward_last10": 0.9, "wall_s": 1.0,
    })  # fmt: skip
    return run


def settings(total_steps: int) -> Record:
    return {
        "trainer.total_training_steps": total_steps,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
        "checkpoint.keep_last": 50,
    }


class Watched(Driver):
    """A run that a worker's flow process works on: its end is a flow run's, not a command's."""

    def __init__(self, platform: Platform, name: str) -> None:
        super().__init__(platform.folder / name, [])
        self.platform = platform

    def wait_for(self, what: str, condition: Callable[[list[Record]], Any], timeout_s: float = PATIENCE_S) -> Any:
        deadline = time.monotonic() + max(timeout_s, PATIENCE_S)
        while not (found := condition(self.events())):
            log = guard.log_path(self.platform.platform, local.WORKER).read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, f"not in time: {what}\n{log}"
            time.sleep(0.05)
        return found

    def wait_for_result(self) -> Record:
        self.wait_for("result.json", lambda _: self.run.result.is_file())
        result: Record = read_json(self.run.result)
        return result

    def flow(self) -> ProcessRef:
        """The living flow process of the newest attempt."""
        (flow,) = [ref for ref in self.processes("flow") if ref.alive()]
        return flow

    def verified(self) -> int:
        """Newest step that is published and verified."""
        return max(event["step"] for event in self.events() if event["event"] == "checkpoint_verified")

    def resumed(self, attempt: int) -> int:
        """The step from which an attempt went on."""
        return next(e["step"] for e in self.events() if e["event"] == "resumed" and e["attempt"] == attempt)


def test_up_again_changes_nothing(platform: Platform) -> None:
    """Idempotent: the same processes, one automation of each name, and nothing secret or stale in what is printed."""
    before, automations = platform.processes(), platform.api.ask("POST", "automations/filter", {})
    told = platform.keepstep("up")
    assert platform.processes() == before
    assert f"export PREFECT_API_URL={platform.api.url}\n" in told
    again = platform.api.ask("POST", "automations/filter", {})
    assert sorted(one["name"] for one in again) == [
        "keepstep-cancelling-runs-cancelled", "keepstep-crashed-runs-again", "keepstep-silent-runs-crashed",
        "keepstep-starts-in-vain-failed",
    ]  # fmt: skip
    assert sorted(one["updated"] for one in again) == sorted(one["updated"] for one in automations)


def test_killed_flow_goes_on_and_a_second_run_of_its_folder_is_refused(platform: Platform) -> None:
    """C140, C142, C143, C145, and C128 at the end: one folder, three processes of one flow run, one training."""
    watched = Watched(platform, "killed")
    first = platform.start(watched.run, settings(24))
    watched.wait_for("attempt 1", lambda events: any(event["event"] == "attempt_started" for event in events))

    second = platform.start(watched.run, settings(24))
    refused = platform.wait_for(second, "a failure", lambda found: found["state"]["type"] == "FAILED")
    assert "is held: attempt 1 runs on this host as process" in refused["state"]["message"]
    assert watched.run.attempt_numbers() == [1] and watched.flow().alive()

    watched.wait_for_verified(4)
    verified, orphans, flow = watched.verified(), watched.processes(), watched.flow()
    watched.kill_process(flow)
    watched.wait_for_step(verified + 2, attempt=2)
    assert watched.resumed(2) >= verified
    assert wait_until_gone([ref for ref in orphans if ref.role not in ("object-store", "prefect-server")]) == []

    result = watched.wait_for_result()
    leaving = watched.flow()
    os.kill(leaving.pid, signal.SIGTERM)
    assert wait_until_gone([leaving], 120) == []
    ended = platform.wait_for_state(first, "Completed")
    assert ended["run_count"] >= 2 and ended["name"] == "killed-1"
    assert (result["final_step"], result["attempts"], result["uploaded"]) == (24, 2, 24)
    assert read_json(watched.run.result) == result and watched.run.attempt_numbers() == [1, 2]
    assert "AwaitingRetry" not in platform.states(second)


@pytest.mark.long
def test_killed_worker_and_flow_go_on_and_so_does_a_platform_that_was_taken_down(platform: Platform) -> None:
    """C131, C139, C145: the flow outlives its worker; both gone, silence tells; `down` saves, `up` goes on."""
    watched = Watched(platform, "silent")
    flow_run = platform.start(watched.run, settings(36))
    watched.wait_for_verified(2)
    worker, flow = platform.worker(), watched.flow()
    watched.kill_process(worker)
    platform.wait_for(flow_run, "another worker", lambda _: platform.worker().pid != worker.pid)
    watched.wait_for_step(watched.verified() + 4, attempt=1)
    assert flow.alive() and platform.worker().alive()

    verified = watched.verified()
    watched.kill_process(platform.worker())
    watched.kill_process(flow)
    assert platform.flow_run(flow_run)["state"]["name"] == "Running", "nobody was left to tell"
    watched.wait_for_step(verified + 1, attempt=2)
    assert platform.states(flow_run)[-4:] == ["Crashed", "AwaitingRetry", "Pending", "Running"]
    assert watched.resumed(2) >= verified

    recorded = [*platform.processes(), *watched.all_processes()]
    name = platform.flow_run(flow_run)["name"]
    assert f"flow run {name} goes on after: keepstep up {platform.folder}\n" in platform.keepstep("down")
    assert [ref for ref in recorded if ref.alive()] == []
    saved = watched.verified()
    assert any(event["event"] == "preempted" for event in watched.events()), "it was not given time to save"

    platform.keepstep("up")
    assert platform.wait_for_state(flow_run, "Completed")["run_count"] == 3
    assert watched.resumed(3) >= saved
    result = read_json(watched.run.result)
    assert (result["final_step"], result["attempts"]) == (36, 3)


@pytest.mark.long
def test_cancelled_run_saves_and_stays_cancelled(platform: Platform) -> None:
    """From the command line, as from the page: within the grace, with a good checkpoint, no process, and no retry."""
    watched = Watched(platform, "cancelled")
    flow_run = platform.start(watched.run, settings(200))
    watched.wait_for_verified(2)
    everything = watched.processes()
    cancel = [sys.executable, "-m", "prefect", "--no-prompt", "flow-run", "cancel", flow_run]
    environment = {**clean_environment(), "PREFECT_API_URL": platform.api.url, "DO_NOT_TRACK": "1"}
    done = subprocess.run(cancel, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    platform.wait_for_state(flow_run, "Cancelled")
    left = [ref for ref in everything if ref.role not in servers.ROLES]
    assert wait_until_gone(left, 60) == []
    assert any(event["event"] == "preempted" for event in watched.events()), "it was not given time to save"
    step = max(event["step"] for event in watched.events() if event["event"] == "step")
    assert watched.verified() == step < 200
    assert verify(watched.run.checkpoint(step)).resumable
    assert "AwaitingRetry" not in platform.states(flow_run) and watched.run.attempt_numbers() == [1]


@pytest.mark.long
def test_infrastructure_that_starts_later_or_never(platform: Platform, complete: RunDir, tmp_path: Path) -> None:
    """C136: a start that fails is a crash, which is tried again; one that always fails ends with a name of its own."""
    command = tmp_path / "start-flow"
    late = platform.start(complete, COMPLETE, {"command": str(command)})
    never = platform.start(complete, COMPLETE, {"command": str(tmp_path / "no-such-command")})
    platform.wait_for(late, "Crashed", lambda _: "Crashed" in platform.states(late))
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prefect.engine\n')
    command.chmod(0o755)
    platform.wait_for_state(late, "Completed")
    platform.wait_for_state(never, "StartsInVain")
    assert complete.attempt_numbers() == []


@pytest.mark.long
def test_strays_end_in_the_right_state(platform: Platform, strays: Strays) -> None:
    """C130, C131: taken by a worker that died before its flow began; cancelled, and nobody left to cancel it."""
    platform.wait_for_state(strays.pending, "Completed")
    assert platform.states(strays.pending)[-5:] == ["Crashed", "AwaitingRetry", "Pending", "Running", "Completed"]
    platform.wait_for_state(strays.cancelling, "Cancelled")


def test_database_by_setting_is_written_nowhere(tmp_path: Path) -> None:
    """A database that cannot be reached: the start fails, and its password stands in no file and no message."""
    secret = "s3cr3t-of-the-database"
    url = f"postgresql+asyncpg://keepstep:{secret}@127.0.0.1:1/prefect"
    arguments = [sys.executable, "-m", "keepstep.cli.main", "up", str(tmp_path / "runs")]
    environment = {**clean_environment(), servers.DATABASE_VARIABLE: url}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stdout
    assert "prefect-server" in done.stderr
    assert secret not in done.stdout + done.stderr
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_deployment_runs_by_the_command_that_up_prints(platform: Platform, complete: RunDir) -> None:
    """`prefect deployment run … --watch` as in the documents, with parameters."""
    overrides = {**COMPLETE, "trainer.output_dir": str(complete.root)}
    arguments = ["deployment", "run", "grpo-train/quickstart", "--param", f"overrides={json.dumps(overrides)}"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments, "--watch"],
        env={**clean_environment(), "PREFECT_API_URL": platform.api.url, "DO_NOT_TRACK": "1"},
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
