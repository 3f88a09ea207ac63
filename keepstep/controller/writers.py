"""The processes that write checkpoints: one for layout `full`, one per rank for layout `sharded`.

Concurrency: called by the saver's thread alone, one save at a time. It waits for the writers within the limit that it
is given; they read the ranks' host memory and wait for nobody but each other (layout `sharded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from keepstep.checkpoint.written import SaveRequest, SaveResult
from keepstep.controller.supervision import Supervisor


@dataclass
class Snapshots:
    """References to what the ranks have copied for one save, in rank order; `reference` may be empty."""

    ranks: list[Any]
    reference: list[Any]


class FullWriter:
    """One process that writes everything."""

    def __init__(self, actor: Any, host: str, supervisor: Supervisor) -> None:
        self._actor, self._host, self._supervisor = actor, host, supervisor

    def shares_memory_with(self, rank_hosts: list[str]) -> list[bool]:
        """Per rank, whether its memory can be mapped by who writes it."""
        return [host == self._host for host in rank_hosts]

    def end(self) -> None:
        ray.kill(self._actor)

    def save(self, request: SaveRequest, snapshots: Snapshots, timeout_s: float) -> SaveResult:
        call = self._actor.save.remote(request, snapshots.reference, snapshots.ranks)
        return self._supervisor.gather([("writer", call)], timeout_s, f"saving step {request.step}")[0]


class ShardWriters:
    """One process per rank, on its rank's node; the first of them begins and ends each save."""

    def __init__(self, actors: list[Any], supervisor: Supervisor, connect_timeout_s: float) -> None:
        self._actors, self._supervisor = actors, supervisor
        self._connect(connect_timeout_s)

    def shares_memory_with(self, rank_hosts: list[str]) -> list[bool]:
        return [True for _ in rank_hosts]

    def end(self) -> None:
        """Before others take their places: one that is still at work would delete what those write."""
        for actor in self._actors:
            ray.kill(actor)

    def save(self, request: SaveRequest, snapshots: Snapshots, timeout_s: float) -> SaveResult:
        deadline = time.monotonic() + timeout_s
        first = self._actors[0]
        own_reference = [[shard] for shard in snapshots.reference] or [[] for _ in self._actors]
        self._all(request, deadline, lambda: [first.begin.remote(request, snapshots.ranks[:1], own_reference[0])])
        try:
            written = self._all(
                request,
                deadline,
                lambda: [
                    actor.write_shards.remote(request, [shard], reference)
                    for actor, shard, reference in zip(self._actors, snapshots.ranks, own_reference, strict=True)
                ],
            )
            return self._all(request, deadline, lambda: [first.finish.remote(request, snapshots.ranks, written)])[0]
        except Exception:
            first.discard.remote(request)
            raise

    def _connect(self, timeout_s: float) -> None:
        what = "meeting of the writers"
        ((host, port),) = self._supervisor.gather([("writer 0", self._actors[0].rendezvous.remote())], timeout_s, what)
        size = len(self._actors)
        calls = [
            (f"writer {rank}", actor.connect.remote(host, port, rank, size, timeout_s))
            for rank, actor in enumerate(self._actors)
        ]
        self._supervisor.gather(calls, timeout_s, what)

    def _all(self, request: SaveRequest, deadline: float, start: Callable[[], list[Any]]) -> list[Any]:
        calls = [(f"writer {rank}", call) for rank, call in enumerate(start())]
        return self._supervisor.gather(calls, deadline - time.monotonic(), f"saving step {request.step}")
