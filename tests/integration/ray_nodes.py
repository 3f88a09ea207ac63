"""A Ray cluster of several nodes on this machine, each of which can be taken away as a whole.

A node is what `ray start --block` starts: the raylet with its agents, and every worker, driver and job below. All of
them inherit a mark in their environment, and by it they are found when their parents are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.platform.servers import _free_ports
from keepstep.processes import ProcessRef, marked
from tests.integration.driver import Driver, clean_environment

RAY_START_S = 120.0
POLL_S = 0.3
MARK = "KS_TEST_RAY_NODE"
SUBNET = "10.213.77"
INTERFACE = "ks0"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
RECONNECT_S = 15
"""How long a raylet looks for a head that is gone, before it ends with its workers; Ray's default is 60."""


@dataclass
class RayNode:
    """One node. `name` is also the name of a resource that only this node has."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    def members(self) -> list[ProcessRef]:
        """All living processes of this node."""
        return marked(MARK, {self.mark: self.name})

    def holds(self, ref: ProcessRef) -> bool:
        return any(member.pid == ref.pid for member in self.members())

    def kill(self) -> None:
        """SIGKILL the whole node, as when its machine goes."""
        deadline = time.monotonic() + 20
        while (living := self.members()) and time.monotonic() < deadline:
            for ref in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ref.pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait(timeout=10)
        assert not living, living

    def stop(self) -> None:
        """End the node in order, and what is left of it by force."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=15)
        self.kill()


@dataclass
class Place:
    """Where a node is started: here, or in a network namespace under an address and a host name."""

    namespace: str = ""
    host: str = ""
    ip: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *under_host_name(self.host)] if self.namespace else []

    def cut(self) -> None:
        """Take its network away; nobody is told."""
        self._link("down")

    def mend(self) -> None:
        self._link("up")

    def _link(self, state: str) -> None:
        run_ip("-n", self.namespace, "link", "set", INTERFACE, state)


@dataclass
class RayCluster:
    """`address` is that of the job server, `gcs` that of the head."""

    folder: Path
    ip: str = "127.0.0.1"
    ports: list[int] = field(default_factory=lambda: _free_ports(2))
    nodes: dict[str, RayNode] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"http://{self.ip}:{self.ports[1]}"

    @property
    def gcs(self) -> str:
        return f"{self.ip}:{self.ports[0]}"

    def start_head(self, num_cpus: int, place: Place | None = None) -> RayNode:
        """Start the head, at the same address whenever it is started, and wait for its job server."""
        port, dashboard = self.ports
        arguments = ["--head", f"--port={port}", f"--dashboard-host={self.ip}", f"--dashboard-port={dashboard}"]
        node = self._start("head", num_cpus, [*arguments, f"--temp-dir={self.folder}"], place or Place())
        self.wait(node, "the job server", lambda: self.ask("/api/jobs/") is not None)
        return node

    def add(self, name: str, num_cpus: int, place: Place | None = None, num_gpus: int = 0) -> RayNode:
        """Start a node and wait until the head knows it. GPUs are in Ray's books alone."""
        node = self._start(name, num_cpus, [f"--address={self.gcs}", f"--num-gpus={num_gpus}"], place or Place())
        self.wait(node, f"node {name}", lambda: self.node_id(name))
        return node

    def ask(self, path: str) -> Any:
        """What the job server says; None when it says nothing."""
        try:
            with urllib.request.urlopen(f"{self.address}{path}", timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def node_id(self, name: str) -> str | None:
        """Ray's id of the living node of this name."""
        answer = self.ask("/api/v0/nodes?detail=1")
        nodes = answer["data"]["result"]["result"] if answer and answer.get("result") else []
        alive = [node for node in nodes if node["state"] == "ALIVE" and name in node["resources_total"]]
        return alive[0]["node_id"] if alive else None

    def drain(self, name: str, deadline_s: int) -> None:
        """Tell Ray that the node is going to be taken."""
        command = [*RAY, "drain-node", f"--address={self.gcs}", f"--node-id={self.node_id(name)}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test takes it"]
        command += [f"--deadline-remaining-seconds={deadline_s}"]
        subprocess.run(command, check=True, timeout=60, env=node_environment("drain"), stdout=subprocess.DEVNULL)

    def holder(self, ref: ProcessRef) -> RayNode:
        """The node that this process belongs to."""
        return next(node for node in self.nodes.values() if node.holds(ref))

    def wait_until_empty(self, node: RayNode) -> None:
        """Until the node has ended by itself, and nothing of it remains."""
        deadline = time.monotonic() + RAY_START_S
        while living := node.members():
            assert time.monotonic() < deadline, living
            time.sleep(POLL_S)

    def forget(self, node: RayNode) -> None:
        """Ended, and another may have its name."""
        node.stop()
        self.nodes = {name: other for name, other in self.nodes.items() if other is not node}

    def stop(self) -> None:
        for node in reversed(list(self.nodes.values())):
            node.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait(self, node: RayNode, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + RAY_START_S
        while not condition():
            said = node.log.read_text(errors="replace")[-2000:]
            assert node.process.poll() is None, f"ray start ended with {node.process.returncode}: {said}"
            assert time.monotonic() < deadline, f"{what} not within {RAY_START_S} s: {said}"
            time.sleep(POLL_S)

    def _start(self, name: str, num_cpus: int, arguments: list[str], place: Place) -> RayNode:
        mark, log = uuid.uuid4().hex, self.folder / f"{name}.log"
        # The default agent port belongs to whichever cluster of this machine came first.
        (agent,) = _free_ports(1)
        command = [*place.prefix, *RAY, "start", "--block", "--disable-usage-stats", *arguments]
        command += [f"--node-ip-address={place.ip}"] if place.ip else []
        command += [f"--num-cpus={num_cpus}", f"--resources={json.dumps({name: 1})}"]
        command += [f"--dashboard-agent-listen-port={agent}", "--object-store-memory=200000000"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, env=node_environment(mark) | place.environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.nodes[name] = RayNode(name, process, log, mark)
        return self.nodes[name]


def node_environment(mark: str) -> dict[str, str]:
    return clean_environment() | {
        MARK: mark,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        # A job's `python` is found on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def ray_cluster(ip: str = "127.0.0.1") -> Iterator[RayCluster]:
    """A cluster without nodes yet, which ends with all that it was given."""
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="ks-ray-", dir="/tmp")), ip)
    try:
        yield cluster
    finally:
        cluster.stop()


@dataclass
class PlacedDriver(Driver):
    """A driver whose command runs elsewhere: behind a prefix such as `ip netns exec NAME`."""

    prefix: list[str] = field(default_factory=list)

    def start(self) -> None:
        settings = [f"trainer.output_dir={self.output_dir}", *self.overrides]
        command = [sys.executable, "-m", "keepstep.cli.main", self.command, "--config", "quickstart", *settings]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment()
            )


@contextmanager
def networks(number: int) -> Iterator[list[Place]]:
    """So many places with a network interface and a host name of their own, on one bridge of this machine.

    Raises:
        subprocess.CalledProcessError: this machine does not let us make them (root and iproute2 are needed).
    """
    tag = f"ks{os.getpid() % 100_000}"
    names = [f"{tag}n{index}" for index in range(number)]
    try:
        run_ip("link", "add", tag, "type", "bridge")
        run_ip("addr", "add", f"{SUBNET}.254/24", "dev", tag)
        run_ip("link", "set", tag, "up")
        for index, name in enumerate(names):
            run_ip("netns", "add", name)
            run_ip("link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            run_ip("link", "set", name, "master", tag, "up")
            run_ip("-n", name, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                run_ip("-n", name, "link", "set", interface, "up")
        yield [
            Place(name, f"node-{index}", f"{SUBNET}.{index + 1}", {"GLOO_SOCKET_IFNAME": INTERFACE})
            for index, name in enumerate(names)
        ]
    finally:
        for name in names:
            can("ip", "netns", "del", name)
        can("ip", "link", "del", tag)


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def under_host_name(name: str) -> list[str]:
    """Prefix of a command that then runs under another host name on this machine."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]


def can(*command: str) -> bool:
    """Whether this machine lets us do that."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
