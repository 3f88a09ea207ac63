"""The deployment that ships, on a process work pool: registered, picked up by a worker, trained to Completed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.platform import servers
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
POOL = "keepstep-local"


@pytest.fixture
def environment(workspace: Path) -> Iterator[dict[str, str]]:
    """Of a client of a server of its own."""
    platform = workspace / "deployment" / ".keepstep"
    holder = ProcessRef.current("flow")
    info = servers.prefect_server(platform, holder)
    yield {**os.environ, **info.env, "PREFECT_WORKER_QUERY_SECONDS": "2", "DO_NOT_TRACK": "1"}
    servers.release(platform, holder)


def prefect(environment: dict[str, str], *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        env=environment,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def worker(environment: dict[str, str], workspace: Path) -> Iterator[Path]:
    """A worker of the pool; yields its log."""
    created = prefect(environment, "work-pool", "create", POOL, "--type", "process")
    assert created.returncode == 0, created.stdout + created.stderr
    log = workspace / "deployment" / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL],
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    yield log
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_deployment_runs_to_completed(environment: dict[str, str], worker: Path, workspace: Path) -> None:
    deployed = prefect(environment, "deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    run = RunDir.at(workspace / "deployment" / "run")
    overrides = {
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
        "trainer.output_dir": str(run.root),
    }
    parameter = f"overrides={json.dumps(overrides)}"
    started = ("deployment", "run", "grpo-train/quickstart", "--param", parameter, "--watch")
    watched = prefect(environment, *started, timeout_s=300)
    assert watched.returncode == 0, watched.stdout + watched.stderr + worker.read_text()[-4000:]
    result = read_json(run.result)
    assert (result["final_step"], result["uploaded"]) == (4, 4)
    assert run.steps() == [2, 4]
