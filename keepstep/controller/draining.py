"""Nodes that are going to be taken away: Ray calls them draining, and places nothing new on them.

Who announces a node to Ray is the cluster's matter (KubeRay's autoscaler, the hook of a pod, `ray drain-node`). An
attempt that has workers on such a node saves and leaves; the next one is placed on the nodes that remain.

Concurrency: one thread, from `start` to `stop`; it asks Ray once in `POLL_S` and consumes nothing. What it produces is
one call of `Leaving.ask`, after which it ends. A Ray that does not answer is asked again: its loss shows elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from keepstep.controller.reporting import logger

if TYPE_CHECKING:
    from keepstep.controller.cluster import Cluster
    from keepstep.controller.leaving import Leaving
    from keepstep.events.log import EventLog

POLL_S = 1.0
STOP_TIMEOUT_S = 5.0
LEAST_GRACE_S = 1.0
"""For a deadline that has passed: the node stands until it is really taken."""


@dataclass(frozen=True)
class Notice:
    """Why an attempt must leave, and how long it has; None: no deadline was given."""

    reason: str
    grace_s: float | None


def draining_nodes() -> dict[str, float | None]:
    """Ids of the cluster's draining nodes, with the time (seconds since the epoch) at which each is taken, if known."""
    # Ray has no public call for it; its own Train library watches for preemption in the same way.
    found = ray._private.state.state.get_draining_nodes()
    return {node_id: deadline_ms / 1000 if deadline_ms else None for node_id, deadline_ms in found.items()}


def affected(draining: Mapping[str, float | None], workers: Mapping[str, Sequence[str]], now: float) -> Notice | None:
    """Whether a node that holds workers of ours is going to be taken. Pure.

    Args:
        draining: node id to its deadline, as `draining_nodes` gives it.
        workers: node id to what of ours runs there.
        now: seconds since the epoch.
    """
    hit = sorted(node_id for node_id in draining if workers.get(node_id))
    if not hit:
        return None
    lost = "; ".join(f"node {node_id[:8]} with {', '.join(workers[node_id])}" for node_id in hit)
    deadlines = [deadline for node_id in hit if (deadline := draining[node_id]) is not None]
    grace_s = max(LEAST_GRACE_S, min(deadlines) - now) if deadlines else None
    return Notice(f"draining: {lost}", grace_s)


class DrainWatch:
    """Watches for the draining of nodes that hold the attempt's workers."""

    def __init__(self, cluster: Cluster, leaving: Leaving, events: EventLog) -> None:
        self._cluster = cluster
        self._leaving = leaving
        self._events = events
        self._stopped = threading.Event()
        self._noted: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="drain-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """To be called before Ray is shut down, which the thread asks."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                draining, workers = draining_nodes(), self._cluster.by_node()
            except Exception as error:
                logger.debug("Ray does not tell which nodes drain: %s", error)
                continue
            notice = affected(draining, workers, time.time())
            if notice is not None:
                self._tell(notice)
                return
            for node_id in sorted(draining.keys() - self._noted):
                logger.info("node %s drains; nothing of this attempt runs there", node_id[:8])
            self._noted |= draining.keys()

    def _tell(self, notice: Notice) -> None:
        given = "no deadline" if notice.grace_s is None else f"{notice.grace_s:.0f} s"
        logger.warning("%s (%s): asked to leave", notice.reason, given)
        self._events.emit("node_draining", reason=notice.reason, grace_s=notice.grace_s)
        self._leaving.ask(notice.reason, notice.grace_s)
