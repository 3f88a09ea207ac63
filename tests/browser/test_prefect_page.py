"""A finished quickstart, looked at as a person does: `keepstep ui RUN`, then a browser; and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.cli.main import main
from keepstep.run import RunDir
from tasks.artifacts import key_of
from tests.browser.chromium import BINARY, NO_BROWSER, Browser, wait_for
from tests.integration.driver import Driver, clean_environment

pytestmark = pytest.mark.skipif(not BINARY, reason=NO_BROWSER)
RUN_S, START_S = 900.0, 90.0
WIDTH, HEIGHT = 1400, 1700


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A real run of 12 steps, by the whole flow."""
    settings = ["trainer.total_training_steps=12", "trainer.save_freq=4", "s3.upload_interval=8"]
    driver = Driver(tmp_path_factory.mktemp("page") / "quickstart", settings)
    assert driver.run_to_end(RUN_S) == 0, driver.tail()
    return driver.run


@pytest.fixture(scope="module")
def address(run: RunDir) -> Iterator[str]:
    """Of the page that `keepstep ui` keeps open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", "ui", str(run.root)],
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def ask_api(address: str, path: str) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{address}/api{path}/filter", b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)
        return found


def shown(browser: Browser, *words: str) -> None:
    """Wait until all of these stand on the page."""

    def missing() -> list[str]:
        page = browser.ask("document.body.innerText")
        return [word for word in words if word not in page]

    wait_for(lambda: not missing(), START_S)


def test_the_flow_run_with_its_tasks(browser: Browser, address: str, run: RunDir):
    """Each task by its name: the attempt with the step where it began, checkpoints with their steps."""
    (flow_run,) = ask_api(address, "/flow_runs")
    browser.show(f"{address}/runs/flow-run/{flow_run['id']}", width=WIDTH, height=HEIGHT)
    shown(browser, "Completed", "checkpoint of step 12 verified")
    browser.ask("[...document.querySelectorAll('li')].find(one => one.innerText.trim() === 'Task Runs').click()")
    checkpoints = [f"verify-checkpoint-step-{step}" for step in (4, 8, 12)]
    checkpoints += [f"upload-checkpoint-step-{step}" for step in (8, 12)]
    attempt = f"train_grpo attempt {max(run.attempt_numbers())} from step 0"
    shown(browser, "check_dataset", "preflight", "plan_resume", attempt, *checkpoints, "finish")
    browser.keep("prefect-flow-run", whole=False)


def test_the_state_of_the_run(browser: Browser, address: str, run: RunDir):
    """Attempts, checkpoints with their marks, what to do, and the reward as an image that was really drawn."""
    page = next(a for a in ask_api(address, "/artifacts") if a["key"] == key_of(run))
    browser.show(f"{address}/artifacts/artifact/{page['id']}", width=WIDTH, height=HEIGHT)
    shown(browser, "finished, at step 12 of 12", "What to do", "Attempts", "Checkpoints", "tensorboard --logdir")
    assert wait_for(lambda: browser.ask("document.images.length && document.images[0].naturalWidth")) > 500
    cells = browser.ask("[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim()))")
    assert ["12", "✓", "✓", "✓", "latest, best"] in cells or ["12", "✓", "✓", "✓", "latest"] in cells
    browser.keep("prefect-run-state", whole=False)


def test_the_resume_decision(browser: Browser, address: str):
    table = next(a for a in ask_api(address, "/artifacts") if a["key"] == "resume-decision")
    browser.show(f"{address}/artifacts/artifact/{table['id']}", width=WIDTH, height=900)
    shown(browser, "verdict", "chosen", "begins at step 0: nothing was saved yet")
    browser.keep("prefect-resume-decision", whole=False)


def test_the_progress(browser: Browser, address: str, run: RunDir):
    progress = next(a for a in ask_api(address, "/artifacts") if a["key"] == f"{key_of(run)}-steps")
    browser.show(f"{address}/artifacts/artifact/{progress['id']}", width=WIDTH, height=900)
    shown(browser, "step 12 of 12")
    browser.keep("prefect-progress", whole=False)


def test_the_report_of_a_real_run(browser: Browser, run: RunDir):
    assert main(["report", str(run.root)]) == 0
    browser.show((run.root / "report.html").as_uri(), width=WIDTH)
    shown(browser, "finished, at step 12 of 12", "Reward", "Attempts", "Checkpoints", "Settings and environment")
    browser.keep("report-quickstart")
