"""Recovery in place: a lost rank or engine is replaced while all else lives on.

An engine holds nothing that is not elsewhere: a new one gets the policy's weights and redoes the call. A lost rank
takes its shards along, and its peers hang in the collective that it left: all ranks are replaced, and the state comes
from the best verified checkpoint, as it would in a new attempt.

Concurrency: everything here runs in the loop's thread, while the loop waits. The saver may still be writing a snapshot
that lies in the memory of a dead rank; it is waited for, and what it fails with is dropped: the step comes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from keepstep.checkpoint.history import verified_steps
from keepstep.controller.groups import RankGroup
from keepstep.controller.reporting import logger
from keepstep.controller.supervision import Supervisor
from keepstep.errors import BugError, WorkerDiedError

if TYPE_CHECKING:
    from keepstep.controller.cluster import Cluster
    from keepstep.controller.saver import Saver
    from keepstep.controller.session import Session
    from keepstep.controller.state import TrainState


@dataclass
class Budget:
    """Replacements without a newly verified step. Pure."""

    most: int
    used: int = 0
    verified: int = 0

    def take(self, verified: int) -> bool:
        """Whether one more may be made, now that `verified` is the newest verified step; counts it."""
        if verified > self.verified:
            self.used, self.verified = 0, verified
        self.used += 1
        return self.used <= self.most


@dataclass
class Recovery:
    """What replaces workers of one attempt."""

    session: Session
    cluster: Cluster
    supervisor: Supervisor
    ranks: RankGroup
    start_engine: Callable[[int], Any]
    start_ranks: Callable[[], list[Any]]
    load: Callable[[], TrainState]
    """Choose the best verified checkpoint and load it into the ranks."""
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.session.config.recovery.max_in_a_row)

    def weights(self) -> Any:
        return self.ranks.full_weights()

    def replace(self, actors: list[Any], lost: list[int], error: WorkerDiedError) -> None:
        """Start lost engines again, in their places.

        Raises:
            WorkerDiedError: `error`, when recovery is off or its budget is used up.
        """
        begin = self._begin("engine", error)
        for index in lost:
            actors[index] = self.start_engine(index)
        calls = [(f"engine {index}", actors[index].identity.remote()) for index in lost]
        timeout_s = self.session.config.timeouts.start_s
        identities = self.supervisor.gather(calls, timeout_s, "starting the engines again")
        for index, identity in zip(lost, identities, strict=True):
            self.cluster.record("engine", index, identity)
        self._end("engine", begin)

    def replace_ranks(self, saver: Saver, error: WorkerDiedError) -> TrainState:
        """New ranks for the whole group, with the state of the best verified checkpoint.

        Raises:
            WorkerDiedError: `error`, when no rank died, recovery is off or its budget is used up.
        """
        if not any(role.startswith("rank ") for role in error.roles):
            raise error
        begin = self._begin("rank", error)
        self.session.leaving.training = False
        for actor in self.ranks.actors:
            ray.kill(actor)
        try:
            saver.wait()
        except (WorkerDiedError, BugError) as failure:
            logger.warning("the save in flight is dropped: %s", failure.message)
        self.ranks.actors = self.start_ranks()
        self.ranks.wait_until_started()
        for rank, identity in enumerate(self.ranks.identities):
            self.cluster.record("rank", rank, identity)
        self.ranks.connect()
        state = self.load()
        saver.start_over(state.global_step)
        self.session.leaving.training = True
        self._end("rank", begin)
        return state

    def _begin(self, role: str, error: WorkerDiedError) -> float:
        settings = self.session.config.recovery
        verified = max(verified_steps(self.session.run), default=0)
        if self.session.config.trainer.debug or not settings.in_place or not self.budget.take(verified):
            raise error
        lost = sorted(name for name in error.roles if name.startswith(role))
        logger.warning(
            "%s: replaced in place (%d in a row of at most %d)", error.message, self.budget.used, settings.max_in_a_row
        )
        self.session.events.emit("worker_lost", role=role, lost=lost, reason=error.message)
        return time.monotonic()

    def _end(self, role: str, begin: float) -> None:
        self.session.events.emit("recovered", role=role, seconds=round(time.monotonic() - begin, 3))
