"""With `ray.address` the trainer is a Ray job: its events come back, it outlives its parent, the next takes over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.attempts import claim
from keepstep.checkpoint.verify import verify
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from tests.integration.driver import clean_environment, wait_until_gone
from tests.integration.ray_nodes import PlacedDriver, RayCluster, can, ray_cluster, under_host_name

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LEASE_S = 5.0


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """A one-node cluster."""
    with ray_cluster() as found:
        found.start_head(num_cpus=4)
        yield found


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


def test_every_node_of_the_cluster_is_asked(workspace: Path, cluster: RayCluster):
    """Port, shared folder and clock on each of two nodes, by a job; one that is going to be taken is not asked.

    A port that is in use is named by both.
    """
    cluster.add("leaving", num_cpus=1)
    cluster.drain("leaving", deadline_s=600)
    cluster.add("staying", num_cpus=1)
    found = preflight(workspace / "asked", cluster.address)
    for name in ("port", "shared_folder", "clock", "node_clock"):
        assert [check["status"] for check in found[name]] == ["ok", "ok"], found[name]
        assert all(check["node"] for check in found[name])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = preflight(workspace / "asked", cluster.address, f"actor_rollout_ref.rollout.port={port}")
    assert [check["status"] for check in found["port"]] == ["fail", "fail"]
    assert all(f"is in use by process {os.getpid()}" in check["sentence"] for check in found["port"])


def test_gpus_of_a_cluster_are_looked_for_where_they_are(workspace: Path, cluster: RayCluster):
    """Neither this machine nor the head has a GPU: only the node that says it has one is asked, for what it is worth.

    It is another node than the head, so the folder is looked for there.
    """
    cluster.add("gpus", num_cpus=1, num_gpus=1)
    found = preflight(workspace / "on_gpus", cluster.address, "trainer.device=cuda")
    (memory,) = found["gpu_memory"]
    assert memory["status"] == "fail" and "there is no nvidia-smi to ask" in memory["sentence"], memory
    assert [check["status"] for check in found["shared_folder"]] == ["ok"]
    assert not [check for name in found for check in found[name] if "no CUDA driver" in check["sentence"]]
    found = preflight(workspace / "on_gpus", cluster.address, "trainer.device=auto")
    assert [check for name in found for check in found[name] if "Say which: trainer.device=cuda" in check["remedy"]]


def test_job_is_followed_and_taken_over(workspace: Path, cluster: RayCluster):
    """C130, C134, C137, C146, C149: the job outlives its parent; the next start ends it and resumes from its save.

    The first parent is lost on another host, which only its silence tells; the second one on this host. Each time the
    old attempt still trains when the new one begins.
    """
    overrides = [
        f"ray.address={cluster.address}", "trainer.total_training_steps=40", "trainer.save_freq=4",
        "trainer.test_freq=-1", "retry.heartbeat_s=0.5", f"retry.lease_timeout_s={LEASE_S}",
        "s3.embedded=false", "checkpoint.keep_last=50",
    ]  # fmt: skip
    elsewhere = under_host_name("elsewhere") if can(*under_host_name("elsewhere"), "true") else []
    driver = PlacedDriver(workspace / "job", overrides, command="train", prefix=elsewhere)
    driver.start()
    driver.wait_for_verified(4)
    driver.kill_command()
    lost = lose_parent(driver, attempt=1)
    driver.prefix = []
    driver.start()
    driver.wait_for_step(9, attempt=2)
    driver.kill_command()
    lost += lose_parent(driver, attempt=2)
    assert driver.run_to_end(240) == 0, driver.tail()
    assert wait_until_gone([ref for ref in lost if ref.role not in ("ray", *servers.ROLES)]) == []
    resumed = [event for event in driver.events() if event["event"] == "resumed"]
    assert [event["attempt"] for event in resumed] == [2, 3]
    assert resumed[0]["step"] >= 4
    assert verify(driver.run.checkpoint(40)).resumable
    assert "step   40/40" in driver.tail()


def lose_parent(driver: PlacedDriver, attempt: int) -> list[ProcessRef]:
    """The command was killed: wait until a start may take its trainer over, which is alive; the trainer's processes."""
    (flow,) = driver.processes("flow")
    assert (flow.host == "elsewhere") == bool(driver.prefix)
    deadline = time.monotonic() + LEASE_S + 60
    while claim(driver.run, attempt, LEASE_S).kind != "orphan":
        assert time.monotonic() < deadline, claim(driver.run, attempt, LEASE_S)
        time.sleep(0.1)
    assert any(ref.alive() for ref in driver.processes("controller"))
    return driver.processes()
