"""With `ray.address` the trainer is a Ray job: its events come back, it outlives its parent, the next takes over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.verify import verify
from keepstep.platform.servers import _free_ports
from tests.integration.driver import Driver, clean_environment, wait_until_gone

pytestmark = pytest.mark.integration

RAY_START_S = 120


@pytest.fixture
def cluster() -> Iterator[str]:
    """Address of the job server of a one-node cluster."""
    folder = Path(tempfile.mkdtemp(prefix="ks-ray-", dir="/tmp"))
    port, dashboard, agent = _free_ports(3)
    environment = clean_environment() | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # A job's `python` is found on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    head = subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            # The default agent port belongs to whichever cluster of this machine came first.
            f"--dashboard-agent-listen-port={agent}", "--num-cpus=4",
            f"--temp-dir={folder}", "--object-store-memory=300000000",
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_job_server(f"http://127.0.0.1:{dashboard}", head)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_job_server(address: str, head: subprocess.Popen[bytes]) -> None:
    import time
    import urllib.request

    deadline = time.monotonic() + RAY_START_S
    while time.monotonic() < deadline:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        try:
            urllib.request.urlopen(f"{address}/api/jobs/", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no job server at {address} within {RAY_START_S} s")


def test_job_is_followed_and_taken_over(workspace: Path, cluster: str):
    """C134, C137, C149: the job goes on without its parent; a second start ends it and goes on from its checkpoint."""
    overrides = [
        f"ray.address={cluster}", "trainer.total_training_steps=40", "trainer.save_freq=4", "trainer.test_freq=-1",
        "s3.embedded=false", "checkpoint.keep_last=50",
    ]  # fmt: skip
    driver = Driver(workspace / "job", overrides, command="train")
    driver.start()
    driver.wait_for_verified(4)
    driver.kill_command()
    orphans = driver.all_processes()
    assert any(ref.alive() for ref in orphans if ref.role == "controller")
    driver.wait_for_another_process_step(9)
    assert driver.run_to_end(240) == 0, driver.tail()
    assert wait_until_gone([ref for ref in orphans if ref.role != "ray"]) == []
    resumed = [event for event in driver.events() if event["event"] == "resumed"]
    assert [event["attempt"] for event in resumed] == [2]
    assert resumed[0]["step"] >= 4
    assert verify(driver.run.checkpoint(40)).resumable
    assert "step   40/40" in driver.tail()
