"""Nodes of a cluster are taken away, with and without a word: the run ends with the bytes of the undisturbed one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import EXIT_FAILED, EXIT_PREEMPTED
from keepstep.platform import servers
from keepstep.processes import ProcessRef
from keepstep.run import read_json
from tests.conftest import OVERRIDES, TOTAL_STEPS
from tests.integration.compare import differences
from tests.integration.driver import Driver, wait_until_gone
from tests.integration.ray_nodes import RECONNECT_S, Place, RayCluster, RayNode, networks, ray_cluster

pytestmark = pytest.mark.integration

NOTICED_S = 60
"""For what takes seconds on an idle machine."""
HEALTH_CHECK = {"RAY_health_check_period_ms": "2000", "RAY_health_check_failure_threshold": "3"}
SHORT_LIMITS = ["timeouts.collective_s=20", "timeouts.step_s=60"]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """A head and three nodes with one core each: two ranks and the engine stand on nodes of their own, one is free."""
    with ray_cluster() as found:
        found.start_head(num_cpus=1)
        for name in ("one", "two", "three"):
            found.add(name, num_cpus=1)
        yield found


def ranks_of(driver: Driver) -> list[ProcessRef]:
    return [ref for ref in driver.processes("rank") if ref.alive()]


def node_with_a_rank(driver: Driver, cluster: RayCluster) -> RayNode:
    """A node, not the head, on which a rank stands."""
    holders = [cluster.holder(ref) for ref in ranks_of(driver)]
    assert len({node.name for node in holders}) == 2, "the ranks stand on different nodes"
    return next(node for node in holders if node.name != "head")


def last_step(driver: Driver) -> int:
    return max(event["step"] for event in driver.events() if event["event"] == "step")


def of_kind(driver: Driver, kind: str, attempt: int) -> list[dict[str, Any]]:
    return [event for event in driver.events() if event["event"] == kind and event["attempt"] == attempt]


@pytest.mark.long
def test_nodes_are_taken_away_one_after_another(workspace: Path, reference: Driver, cluster: RayCluster):
    """C130, C137, C148, C149, C160: a node dies, a node is drained, the head dies; then the run ends as ever."""
    driver = Driver(
        workspace / "nodes", [*OVERRIDES, "s3.embedded=false", f"ray.address={cluster.address}"], command="train"
    )
    driver.start()
    lose_a_node(driver, cluster)
    drain_a_node(driver, cluster)
    lose_the_head(driver, cluster)
    assert driver.run_to_end(240) == 0, driver.tail()
    assert read_json(driver.run.result)["attempts"] == 3
    final, expected = driver.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS)
    assert differences(final, expected) == []
    assert driver.rewards() == reference.rewards()


def lose_a_node(driver: Driver, cluster: RayCluster) -> None:
    """In mid-step, without a word: the ranks are replaced within the attempt, on the node that was free."""
    driver.wait_for_verified(5)
    driver.wait_for_step(7)
    victim = node_with_a_rank(driver, cluster)
    before = ranks_of(driver)
    victim.kill()
    begin = time.monotonic()
    driver.wait_for("the loss is noticed", lambda _: of_kind(driver, "worker_lost", 1), NOTICED_S)
    print(f"node lost: noticed after {time.monotonic() - begin:.1f} s")
    driver.wait_for("ranks in place", lambda _: of_kind(driver, "recovered", 1))
    print(f"node lost: ranks replaced after {time.monotonic() - begin:.1f} s")
    assert wait_until_gone(before) == []
    assert [event["role"] for event in of_kind(driver, "worker_lost", 1)] == ["rank"]
    cluster.forget(victim)
    cluster.add("four", num_cpus=1)


def drain_a_node(driver: Driver, cluster: RayCluster) -> None:
    """With a word: the last finished step is saved and verified, and the next attempt stands on other nodes."""
    driver.wait_for_verified(10)
    driver.wait_for_step(12, attempt=1)
    victim = node_with_a_rank(driver, cluster)
    cluster.drain(victim.name, deadline_s=120)
    begin = time.monotonic()
    assert driver.wait(120) == EXIT_PREEMPTED, driver.tail()
    print(f"node drained: left after {time.monotonic() - begin:.1f} s")
    assert of_kind(driver, "node_draining", 1)
    saved = last_step(driver)
    assert of_kind(driver, "checkpoint_verified", 1)[-1]["step"] == saved
    assert not any(victim.holds(ref) for ref in driver.processes())
    driver.start()
    driver.wait_for_step(saved + 1, attempt=2)
    assert [event["step"] for event in of_kind(driver, "resumed", 2)] == [saved]
    assert not any(victim.holds(ref) for ref in driver.processes("rank") + driver.processes("engine"))
    cluster.forget(victim)


def lose_the_head(driver: Driver, cluster: RayCluster) -> None:
    """The head takes the controller along: the command ends and names the cluster; then another head is there."""
    driver.wait_for_verified(25)
    orphans = [ref for ref in driver.processes() if ref.role not in servers.ROLES]
    cluster.nodes["head"].kill()
    cluster.forget(cluster.nodes["head"])
    begin = time.monotonic()
    assert driver.wait(120) == EXIT_FAILED, driver.tail()
    print(f"head lost: the command ended after {time.monotonic() - begin:.1f} s")
    assert cluster.address in driver.tail().splitlines()[-1] or cluster.address in driver.tail()[-600:]
    # Nodes without a head end by themselves, and with them what trained there.
    assert wait_until_gone(orphans, RECONNECT_S + NOTICED_S) == []
    for node in list(cluster.nodes.values()):
        cluster.forget(node)
    cluster.start_head(num_cpus=1)
    for name in ("five", "six"):
        cluster.add(name, num_cpus=1)


@pytest.fixture
def places() -> Iterator[list[Place]]:
    """Two places with networks and host names of their own."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(networks(2))
        except (OSError, subprocess.CalledProcessError) as refused:
            pytest.skip(f"network namespaces cannot be made here: {refused} {getattr(refused, 'stderr', '')!r}")
        yield made


@pytest.mark.long
def test_network_between_two_nodes_is_cut(workspace: Path, reference: Driver, places: list[Place]):
    """C137, C160: a node that vanishes without a word is noticed by time limits, and another one takes its place.

    The process group and the weights cross between the two nodes.
    """
    here, there = places
    here.environment |= HEALTH_CHECK
    with ray_cluster(here.ip) as cluster:
        cluster.start_head(2, here)
        far = cluster.add("far", 1, there)
        settings = [*OVERRIDES, "s3.embedded=false", f"ray.address={cluster.address}", *SHORT_LIMITS]
        driver = Driver(workspace / "cut", settings, command="train")
        driver.start()
        driver.wait_for_verified(5)
        driver.wait_for_step(7)
        assert {ref.host for ref in driver.processes("rank") + driver.processes("engine")} == {"node-0", "node-1"}
        there.cut()
        wait_until_noticed(driver)
        there.mend()
        # Ray has given the node up, and tells it so.
        cluster.wait_until_empty(far)
        cluster.forget(far)
        cluster.add("again", 1, there)
        if driver.process and driver.process.poll() is not None:
            driver.start()
        assert driver.wait(300) == 0, driver.tail()
    final, expected = driver.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS)
    assert differences(final, expected) == []
    assert driver.rewards() == reference.rewards()


def wait_until_noticed(driver: Driver) -> None:
    """Until the attempt replaces what it lost, or ends as one that is worth another."""
    begin, deadline = time.monotonic(), time.monotonic() + 60 + NOTICED_S
    while not of_kind(driver, "worker_lost", 1) and not of_kind(driver, "failed", 1):
        assert time.monotonic() < deadline, driver.tail()
        time.sleep(0.1)
    print(f"network cut: noticed after {time.monotonic() - begin:.1f} s")
    assert all(event["retry"] for event in of_kind(driver, "failed", 1))
