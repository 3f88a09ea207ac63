"""Whole runs are slow: all tests share one that nothing disturbed, and after it its servers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.platform import servers
from keepstep.processes import ProcessRef
from tests.integration.driver import Driver, wait_until_gone

TOTAL_STEPS = 44
OVERRIDES = [
    f"trainer.total_training_steps={TOTAL_STEPS}",
    "trainer.save_freq=5",
    "checkpoint.keep_last=50",
    "s3.upload_interval=20",
    "retry.max_retries=8",
    "retry.delays_s=[0.2]",
]


@pytest.fixture(scope="session")
def workspace() -> Iterator[Path]:
    """A folder with a short path, for the sockets of the servers in it."""
    folder = Path(tempfile.mkdtemp(prefix="ks-test-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def reference(workspace: Path) -> Iterator[Driver]:
    """The undisturbed run: 44 steps over 4.4 epochs of ten steps, a checkpoint every five.

    It starts its servers and ends them, as everybody's first run does. Those of later runs in the workspace are held
    here: a Prefect server takes a quarter of a minute to start.
    """
    driver = Driver(workspace / "reference", OVERRIDES, command="make run")
    assert driver.run_to_end() == 0, driver.tail()
    assert wait_until_gone(driver.all_processes()) == []
    platform, holder = driver.run.platform, ProcessRef.current("flow")
    servers.object_store(platform, holder)
    servers.prefect_server(platform, holder)
    yield driver
    held = servers.running(platform)
    servers.release(platform, holder)
    assert wait_until_gone(held) == []
