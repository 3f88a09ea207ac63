"""The reference run, looked at as a person does: `keepstep ui RUN`, then a browser; and its report."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.checkpoint.history import uploaded_steps
from keepstep.cli.main import main
from keepstep.run import RunDir
from tasks.artifacts import key_of
from tests.browser.chromium import BINARY, NO_BROWSER, Browser, wait_for
from tests.conftest import TOTAL_STEPS
from tests.integration.driver import Driver, clean_environment

pytestmark = pytest.mark.skipif(not BINARY, reason=NO_BROWSER)
START_S = 90.0
WIDTH, HEIGHT = 1400, 1700
FINISHED = f"finished, at step {TOTAL_STEPS} of {TOTAL_STEPS}"


@pytest.fixture(scope="module")
def run(reference: Driver) -> RunDir:
    return reference.run


@pytest.fixture(scope="module")
def address(run: RunDir) -> Iterator[str]:
    """Of the page that `keepstep ui` keeps open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "ui", str(run.root)],
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "`keepstep ui` says nothing"
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def ask_api(address: str, path: str, **only: Any) -> list[dict[str, Any]]:
    """What of this kind (`path`) the server has, as Prefect's filters `only` choose."""
    body = json.dumps({path: only}).encode()
    request = urllib.request.Request(f"{address}/api/{path}/filter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)
        return found


@pytest.fixture(scope="module")
def flow_run(address: str, run: RunDir) -> str:
    """Id of the flow run that trained: other runs share the server."""
    (found,) = ask_api(address, "flow_runs", name={"any_": [f"{run.root.name}-1"]})
    return str(found["id"])


def artifact(address: str, flow_run: str, key: str) -> str:
    """Address of the page of the flow run's artifact with this key."""
    (found,) = ask_api(address, "artifacts", key={"any_": [key]}, flow_run_id={"any_": [flow_run]})
    return f"{address}/artifacts/artifact/{found['id']}"


def shown(browser: Browser, *words: str) -> None:
    """Wait until all of these stand on the page."""

    def missing() -> list[str]:
        page = browser.ask("document.body.innerText")
        return [word for word in words if word not in page]

    wait_for(lambda: not missing(), START_S)


def test_the_flow_run_with_its_tasks(browser: Browser, address: str, flow_run: str, run: RunDir):
    """Each task by its name: the attempt with the step where it began, checkpoints with their steps."""
    browser.show(f"{address}/runs/flow-run/{flow_run}", width=WIDTH, height=HEIGHT)
    shown(browser, "Completed", f"checkpoint of step {TOTAL_STEPS} verified")
    browser.ask("[...document.querySelectorAll('li')].find(one => one.innerText.trim() === 'Task Runs').click()")
    checkpoints = [f"verify-checkpoint-step-{step}" for step in run.steps()]
    checkpoints += [f"upload-checkpoint-step-{step}" for step in uploaded_steps(run)]
    attempt = "train_grpo attempt 1 from step 0"
    shown(browser, "check_dataset", "preflight", "plan_resume", attempt, *checkpoints, "finish")
    browser.keep("prefect-flow-run", whole=False)


def test_the_state_of_the_run(browser: Browser, address: str, flow_run: str, run: RunDir):
    """Attempts, checkpoints with their marks, what to do, and the reward as an image that was really drawn."""
    browser.show(artifact(address, flow_run, key_of(run)), width=WIDTH, height=HEIGHT)
    shown(browser, FINISHED, "What to do", "Attempts", "Checkpoints", "tensorboard --logdir")
    assert wait_for(lambda: browser.ask("document.images.length && document.images[0].naturalWidth")) > 500
    cells = browser.ask("[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim()))")
    last = [str(TOTAL_STEPS), "✓", "✓", "✓"]
    assert [*last, "latest, best"] in cells or [*last, "latest"] in cells
    browser.keep("prefect-run-state", whole=False)


def test_the_resume_decision(browser: Browser, address: str, flow_run: str):
    browser.show(artifact(address, flow_run, "resume-decision"), width=WIDTH, height=900)
    shown(browser, "verdict", "chosen", "begins at step 0: nothing was saved yet")
    browser.keep("prefect-resume-decision", whole=False)


def test_the_progress(browser: Browser, address: str, flow_run: str, run: RunDir):
    browser.show(artifact(address, flow_run, f"{key_of(run)}-steps"), width=WIDTH, height=900)
    shown(browser, f"step {TOTAL_STEPS} of {TOTAL_STEPS}")
    browser.keep("prefect-progress", whole=False)


def test_the_report_of_a_real_run(browser: Browser, run: RunDir):
    assert main(["report", str(run.root)]) == 0
    browser.show((run.root / "report.html").as_uri(), width=WIDTH)
    shown(browser, FINISHED, "Reward", "Attempts", "Checkpoints", "Settings and environment")
    browser.keep("report-quickstart")
