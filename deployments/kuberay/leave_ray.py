"""Pre-stop hook of a Ray pod that is taken away: `leave_ray.py head|worker TIMEOUT_S`.

It has the trainers on the cluster save and leave (SIGTERM, through Ray's job server) and waits until they have ended,
for at most TIMEOUT_S seconds. A worker also drains its Ray node, so that the next attempt is not placed on it; the head
also stops the flow of a RayJob, which a worker leaves alone: that flow starts the next attempt.

Only the standard library and the `ray` command: it runs in the image of the cluster, from a ConfigMap. It never fails:
a pod that cannot say good-bye is stopped all the same.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

TRAINER = "keepstep.cli.main train"
"""Part of the entrypoint of every job that `ray.address` makes Keepstep submit for an attempt."""
TROUBLE = (OSError, ValueError, KeyError)
DRAIN_TIMEOUT_S = 20.0
POLL_S = 0.5


def to_stop(jobs: list[dict[str, Any]], role: str) -> list[str]:
    """Submission ids of the jobs that must leave. Pure."""
    alive = [job for job in jobs if job["status"] in ("PENDING", "RUNNING") and job.get("submission_id")]
    return [job["submission_id"] for job in alive if role == "head" or TRAINER in job["entrypoint"]]


def node_at(nodes: list[dict[str, Any]], address: str) -> str | None:
    """Id of the living Ray node at an IP address. Pure."""
    return next((node["node_id"] for node in nodes if node["node_ip"] == address and node["state"] == "ALIVE"), None)


def ask(url: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as answer:
        return json.load(answer)


def drain(server: str, head: str, timeout_s: float) -> None:
    """Tell Ray that this node is being preempted; where that fails, the wait for the jobs goes on."""
    try:
        nodes = ask(f"{server}/api/v0/nodes")["data"]["result"]["result"]
        address = socket.gethostbyname(socket.gethostname())
        node = node_at(nodes, address)
        if node is None:
            raise ValueError(f"none of the {len(nodes)} Ray nodes lives at {address}")
        command = ["ray", "drain-node", f"--address={head}:6379", f"--node-id={node}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the pod is being stopped"]
        command += [f"--deadline-remaining-seconds={int(timeout_s)}"]
        subprocess.run(command, check=True, timeout=DRAIN_TIMEOUT_S)
    except (*TROUBLE, subprocess.SubprocessError) as error:
        print(f"keepstep: the node was not drained: {type(error).__name__}: {error}", file=sys.stderr)


def stop(server: str, role: str) -> list[str]:
    """Ask the jobs to leave; their ids."""
    jobs = to_stop(ask(f"{server}/api/jobs/"), role)
    for job in jobs:
        ask(f"{server}/api/jobs/{job}/stop", "POST")
    return jobs


def wait(server: str, jobs: list[str], deadline: float) -> list[str]:
    """Wait until `jobs` have ended, until `deadline` (of `time.monotonic`); those that have not ended then."""
    while jobs and time.monotonic() < deadline:
        time.sleep(POLL_S)
        running = to_stop(ask(f"{server}/api/jobs/"), "head")
        jobs = [job for job in jobs if job in running]
    return jobs


def main() -> None:
    role, timeout_s = sys.argv[1], float(sys.argv[2])
    deadline = time.monotonic() + timeout_s
    head = "127.0.0.1" if role == "head" else os.environ["FQ_RAY_IP"]
    server = f"http://{head}:8265"
    try:
        jobs = stop(server, role)
        print(f"keepstep: asked to leave: {', '.join(jobs) or 'no job'}", flush=True)
        if role == "worker":
            drain(server, head, timeout_s)
        late = wait(server, jobs, deadline)
        print(f"keepstep: still running after {timeout_s:.0f} s: {', '.join(late)}" if late else "keepstep: all left")
    except TROUBLE as error:
        print(f"keepstep: the jobs were not stopped: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
