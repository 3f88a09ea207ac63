"""Whole runs are slow: they share one reference."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.driver import Driver

TOTAL_STEPS = 44
OVERRIDES = [
    f"trainer.total_training_steps={TOTAL_STEPS}",
    "trainer.save_freq=5",
    "checkpoint.keep_last=50",
    "s3.upload_interval=20",
    "retry.max_retries=8",
    "retry.delays_s=[0.2]",
]


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """A test that fails in the middle of a run ends it: the next one needs both cores."""
    before = len(Driver.started)
    yield
    for driver in Driver.started[before:]:
        driver.end()


@pytest.fixture(scope="session")
def workspace() -> Iterator[Path]:
    """A folder with a short path, for the sockets of the servers in it."""
    folder = Path(tempfile.mkdtemp(prefix="ks-test-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def reference(workspace: Path) -> Driver:
    """The undisturbed run: 44 steps over 4.4 epochs of ten steps, a checkpoint every five."""
    driver = Driver(workspace / "reference", OVERRIDES, command="make run")
    assert driver.run_to_end() == 0, driver.tail()
    return driver
