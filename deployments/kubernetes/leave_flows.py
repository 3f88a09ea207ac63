"""Pre-stop hook of a pod with a Prefect process worker: `leave_flows.py TIMEOUT_S`.

A worker that is told to stop takes no new runs and waits for those it has, but tells them nothing. So this tells the
worker (process 1) and then each flow process, which has its trainer save and leave, and waits until they have ended.
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
    """Ask the worker and its flows to leave; flows that have not ended at `deadline` (of `time.monotonic`)."""
    flows = children(worker)
    for process in (worker, *flows):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    while flows and time.monotonic() < deadline:
        time.sleep(POLL_S)
        living = children(worker)
        flows = [flow for flow in flows if flow in living]
    return flows


if __name__ == "__main__":
    late = leave(1, time.monotonic() + float(sys.argv[1]))
    print(f"keepstep: still running: {late}" if late else "keepstep: all flows left")
