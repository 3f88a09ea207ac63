"""With `ray.address` the trainer is a Ray job: its events come back, it outlives its parent, the next takes over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.checkpoint.verify import verify
from keepstep.platform.servers import _free_ports
from tests.integration.driver import Driver, clean_environment, wait_until_gone

pytestmark = pytest.mark.integration

RAY_START_S = 120


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of this machine; `address` is that of its job server."""

    address: str
    gcs: str
    folder: Path


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A one-node cluster."""
    folder = Path(tempfile.mkdtemp(prefix="ks-ray-", dir="/tmp"))
    port, dashboard, agent = _free_ports(3)
    found = Cluster(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{port}", folder)
    arguments = [
        "--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        # The default agent port belongs to whichever cluster of this machine came first.
        f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}", "--num-cpus=4",
    ]  # fmt: skip
    try:
        with ray_node(*arguments) as head:
            wait_for_job_server(found.address, head)
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_node(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = clean_environment() | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # A job's `python` is found on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    node = subprocess.Popen(
        [*command, *arguments, "--object-store-memory=300000000"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield node
    finally:
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)


def wait_for_job_server(address: str, head: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + RAY_START_S
    while time.monotonic() < deadline:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        try:
            urllib.request.urlopen(f"{address}/api/jobs/", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no job server at {address} within {RAY_START_S} s")


def preflight(run: Path, address: str, *more: str) -> dict[str, list[dict]]:
    """Answers of the checks by their id."""
    command = [sys.executable, "-m", "keepstep.cli.main", "preflight", "--quick", "--json", "s3.embedded=false"]
    done = subprocess.run(
        [*command, f"trainer.output_dir={run}", f"ray.address={address}", *more],
        capture_output=True, text=True, timeout=180, env=clean_environment(),
    )  # fmt: skip
    found: dict[str, list[dict]] = {}
    for check in json.loads(done.stdout)["checks"]:
        found.setdefault(check["id"], []).append(check)
    return found


def test_every_node_of_the_cluster_is_asked(workspace: Path, cluster: Cluster):
    """Port, shared folder and clock on each of two nodes, by a job on the cluster; a folder that one lacks is named."""
    (agent,) = _free_ports(1)
    arguments = [f"--address={cluster.gcs}", f"--dashboard-agent-listen-port={agent}", "--num-cpus=1"]
    with ray_node(*arguments), socket.socket() as listener:
        deadline = time.monotonic() + RAY_START_S
        found = preflight(workspace / "asked", cluster.address)
        while len(found["port"]) < 2 and time.monotonic() < deadline:
            # The second node is still joining.
            found = preflight(workspace / "asked", cluster.address)
        for name in ("port", "shared_folder", "clock", "node_clock"):
            assert [check["status"] for check in found[name]] == ["ok", "ok"], found[name]
            assert all(check["node"] for check in found[name])
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = preflight(workspace / "asked", cluster.address, f"actor_rollout_ref.rollout.port={port}")
    assert [check["status"] for check in found["port"]] == ["fail", "fail"]
    assert all(f"is in use by process {os.getpid()}" in check["sentence"] for check in found["port"])


def test_job_is_followed_and_taken_over(workspace: Path, cluster: Cluster):
    """C134, C137, C149: the job goes on without its parent; a second start ends it and goes on from its checkpoint."""
    overrides = [
        f"ray.address={cluster.address}", "trainer.total_training_steps=40", "trainer.save_freq=4",
        "trainer.test_freq=-1",
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
