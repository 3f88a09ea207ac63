"""The commands of Prefect that the documents name, given to a bare Prefect server, each as it stands there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.platform import servers
from keepstep.platform.api import LOCAL_POOL, PrefectApi
from keepstep.processes import ProcessRef
from tests.integration.driver import REPOSITORY, clean_environment
from tests.unit import documents

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PATIENCE_S = 300.0
Record = dict[str, Any]


@pytest.fixture(scope="module")
def api(workspace: Path) -> Iterator[PrefectApi]:
    """A server beside nothing: no pool, no deployment."""
    platform = workspace / "bare" / ".keepstep"
    holder = ProcessRef.current("flow")
    info = servers.prefect_server(platform, holder)
    yield PrefectApi(f"{info.url}/api")
    servers.release(platform, holder)


@pytest.fixture(scope="module")
def as_written(api: PrefectApi) -> Callable[..., str]:
    """Runs the one command of the documents that has these words, in the repository, and gives its output."""

    def run(*having: str, **filled_in: str) -> str:
        done = subprocess.run(
            arguments(*having, **filled_in), env=environment(api), cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def registered(api: PrefectApi, as_written: Callable[..., str]) -> dict[str, Record]:
    """Deployments by name, once all that docs/deployments.md says was given to the server."""
    as_written("work-pool", "create")
    as_written("deploy", "--all", "--prefect-file")
    as_written("keepstep.platform.automations", "deployments/automations.yaml")
    return {one["name"]: one for one in api.ask("POST", "deployments/filter", {})}


def arguments(*having: str, **filled_in: str) -> list[str]:
    """The words of that command, Python's and Prefect's programs being those of this environment."""
    found = {one.words for one in documents.commands() if set(having) <= set(one.words) and one.words[-2] != "-c"}
    assert len(found) == 1, f"{having}: {sorted(found)}"
    words = [filled_in.get(word, word) for word in found.pop()]
    return [sys.executable, *(["-m"] if words[0] == "prefect" else []), *words[words[0] == "python" :]]


def environment(api: PrefectApi) -> dict[str, str]:
    return clean_environment() | {"PREFECT_API_URL": api.url, "DO_NOT_TRACK": "1", "NO_COLOR": "1", "COLUMNS": "200"}


def test_what_another_server_is_given(registered: dict[str, Record], api: PrefectApi):
    assert registered.keys() >= {"quickstart", "single-gpu", "checkpoint-audit"}
    assert registered["quickstart"]["work_pool_name"] == LOCAL_POOL
    assert {one["name"] for one in api.ask("POST", "automations/filter", {})} >= {"keepstep-crashed-runs-again"}


def test_a_schedule_is_switched_on(registered: dict[str, Record], api: PrefectApi, as_written: Callable[..., str]):
    (schedule,) = registered["single-gpu"]["schedules"]
    assert not schedule["active"]
    (shown,) = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", as_written("schedule", "ls"))
    assert shown == schedule["id"]
    as_written("schedule", "resume", ID=shown)
    (schedule,) = api.ask("GET", f"deployments/{registered['single-gpu']['id']}")["schedules"]
    assert schedule["active"]


def test_a_schedule_of_ones_own_outlives_the_next_registration(
    registered: dict[str, Record], api: PrefectApi, as_written: Callable[..., str]
):
    """`keepstep up` registers the same file at every start."""
    as_written("schedule", "create")
    as_written("deploy", "--all", "--prefect-file")
    (schedule,) = api.ask("GET", f"deployments/{registered['quickstart']['id']}")["schedules"]
    assert schedule["active"] and schedule["schedule"]["cron"] == "0 22 * * *"


def test_a_failed_flow_run_says_why_and_is_queued_again(
    registered: dict[str, Record], api: PrefectApi, as_written: Callable[..., str]
):
    created = api.ask("POST", f"deployments/{registered['quickstart']['id']}/create_flow_run", {})
    api.ask("POST", f"flow_runs/{created['id']}/set_state", {"state": {"type": "FAILED"}, "force": True})
    line = {"name": "flow", "level": 40, "message": "forty is no number", "timestamp": "2026-11-01T00:00:00Z"}
    api.ask("POST", "logs/", [line | {"flow_run_id": created["id"]}])
    assert created["name"] in as_written("flow-run", "ls", "--state-type")
    assert "forty is no number" in as_written("flow-run", "logs", ID=created["id"])
    as_written("flow-run", "retry", ID=created["id"])
    assert api.ask("GET", f"flow_runs/{created['id']}")["state"]["type"] == "SCHEDULED"
    # A worker must not find it.
    api.ask("DELETE", f"flow_runs/{created['id']}")


def test_blocks_are_listed(as_written: Callable[..., str]):
    assert "Blocks" in as_written("block", "ls")


def test_a_worker_polls(registered: dict[str, Record], api: PrefectApi):
    # A schedule that is due at this very minute must not begin a training.
    api.pause(LOCAL_POOL, True)
    process = subprocess.Popen(
        arguments("worker", "start"), env=environment(api), cwd=REPOSITORY, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any("started!" in line for line in process.stdout), process.wait(PATIENCE_S)
        assert len(api.online_workers(LOCAL_POOL)) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
