"""Pre-stop hook of a pod with a Prefect process worker: `leave_flows.py TIMEOUT_S`.

A worker (process 1) that is told to stop kills its flows at once. So this tells each flow process first, which has its
trainer save and leave, and waits until they have ended; only then does the kubelet tell the worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.5


def children(parent: int) -> list[int]:
    """Living processes whose parent is `parent`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            # After the name, which may hold anything: state and parent.
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(entry.name))
    return found


def leave(worker: int, deadline: float) -> list[int]:
    """Ask the flows of a worker to leave; those that have not ended at `deadline` (of `time.monotonic`)."""
    flows = children(worker)
    for flow in flows:
        with contextlib.suppress(ProcessLookupError):
            os.kill(flow, signal.SIGTERM)
    while flows and time.monotonic() < deadline:
        time.sleep(POLL_S)
        living = children(worker)
        flows = [flow for flow in flows if flow in living]
    return flows


if __name__ == "__main__":
    late = leave(1, time.monotonic() + float(sys.argv[1]))
    print(f"keepstep: still running: {late}" if late else "keepstep: all flows left")
