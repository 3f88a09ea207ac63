"""Asked to leave, held by another, taken over: one attempt at a time, and a good checkpoint behind it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.checkpoint.verify import verify
from keepstep.run import read_json
from tests.integration.driver import Driver, clean_environment, wait_until_gone

pytestmark = pytest.mark.integration

OVERRIDES = ["trainer.total_training_steps=60", "trainer.save_freq=50", "trainer.test_freq=-1", "s3.embedded=false"]


def test_second_start_is_refused_and_sigterm_saves(workspace: Path):
    """C140: the holder is named and nothing is written. C151, C155: a notice saves the finished step, exit 75."""
    driver = Driver(workspace / "leaving", OVERRIDES)
    driver.start()
    driver.wait_for_step(3)
    second = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "train", f"trainer.output_dir={driver.output_dir}", *OVERRIDES],
        capture_output=True, text=True, timeout=60, env=clean_environment(),
    )  # fmt: skip
    assert second.returncode == 5, second.stderr
    (owner,) = driver.processes("controller")
    assert f"process {owner.pid}" in second.stderr and "Traceback" not in second.stderr
    assert driver.run.attempt_numbers() == [1]

    assert driver.process is not None
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 75, driver.tail()
    (step,) = driver.run.steps()
    assert verify(driver.run.checkpoint(step)).resumable
    finished = [event["step"] for event in driver.events() if event["event"] == "step"]
    assert step == finished[-1] < 60
    assert read_json(driver.run.attempt(1))["outcome"]["status"] == "preempted"
    assert wait_until_gone(driver.all_processes()) == []

    driver.command = "train"
    driver.start()
    driver.wait_for_step(step + 2)
    assert [event["step"] for event in driver.events() if event["event"] == "resumed"] == [step]
    driver.process.send_signal(signal.SIGINT)
    assert driver.wait(60) == 75, driver.tail()
    steps = [event["step"] for event in driver.events() if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)) and driver.run.steps()[-1] == steps[-1]
