"""Recovery in place: a lost rank or engine is replaced while all else lives on.

An engine holds nothing that is not elsewhere: a new one gets the policy's weights and redoes the call. A lost rank
takes its shards along, and its peers hang in the collective that it left: all ranks are replaced, and the state comes
from the best verified checkpoint, as it would in a new attempt. What hangs beyond its time limit is ended and counts as
lost.

Concurrency: everything here runs in the loop's thread, while the loop waits. The saver may still be writing a snapshot
that lies in the memory of a dead rank; it is waited for, and what it fails with is dropped: the step comes again.
A replacement starts to import as soon as the death is seen (`see`), also while the loop still waits for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.history import verified_steps
from keepstep.controller.groups import RankGroup
from keepstep.controller.reporting import logger
from keepstep.controller.session import Session
from keepstep.controller.workforce import Workforce
from keepstep.errors import BugError, KeepstepError, NoProgressError, WorkerDiedError

if TYPE_CHECKING:
    from keepstep.controller.saver import Saver
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
    workforce: Workforce
    ranks: RankGroup
    load: Callable[[], TrainState]
    """Choose the best verified checkpoint and load it into the ranks."""
    engines_sleep: bool
    """A new engine finds its memory taken while ranks train: it is started when it is next asked for something."""
    budget: Budget = field(init=False)
    _coming: dict[str, float] = field(default_factory=dict)
    """Engines whose replacement is on its way, and since when."""

    def __post_init__(self) -> None:
        self.budget = Budget(self.session.config.recovery.max_in_a_row)

    def weights(self) -> Any:
        return self.ranks.full_weights(self.session.config.actor_rollout_ref.rollout.dtype)

    def see(self, gone: set[str], what: str) -> None:
        """Told of workers that died while the answer of others is waited for, and what for.

        Raises:
            WorkerDiedError: a rank died, so that what is waited for is of no use any more.
        """
        error = WorkerDiedError(f"{what}: {', '.join(sorted(gone))} died.").of(gone)
        if any(role.startswith("rank ") for role in gone):
            raise error
        if not self.engines_sleep:
            for role in gone - set(self._coming):
                self._start_engine(role, error)

    def replace(self, actors: list[Any], lost: list[int], error: KeepstepError) -> None:
        """Start lost engines again, in their places.

        Raises:
            KeepstepError: `error`, when recovery is off or its budget is used up.
        """
        for index in lost:
            if f"engine {index}" not in self._coming:
                self.workforce.end(f"engine {index}", actors[index])
                self._start_engine(f"engine {index}", error)
        for index in lost:
            actors[index] = self.workforce.engine(index)
            self._end("engine", self._coming.pop(f"engine {index}"))

    def replace_ranks(self, saver: Saver, error: KeepstepError) -> TrainState:
        """New ranks for the whole group, with the state of the best verified checkpoint.

        Raises:
            KeepstepError: `error`, when no rank is lost, recovery is off or its budget is used up.
        """
        lost = sorted(role for role in error.roles if role.startswith("rank "))
        if not lost:
            raise error
        begin = self._begin("rank", lost, error)
        self.session.leaving.training = False
        for rank, actor in enumerate(self.ranks.actors):
            self.workforce.end(f"rank {rank}", actor)
        self.workforce.start_ranks()
        try:
            saver.wait()
        except (WorkerDiedError, NoProgressError, BugError) as failure:
            logger.warning("the save in flight is dropped: %s", failure.message)
        self.ranks.actors, self.ranks.identities = self.workforce.ranks()
        self.ranks.connect()
        state = self.load()
        saver.start_over(state.global_step or None)
        self.session.leaving.training = True
        self._end("rank", begin)
        return state

    def _start_engine(self, role: str, error: KeepstepError) -> None:
        self._coming[role] = self._begin("engine", [role], error)
        self.workforce.start_engine(int(role.removeprefix("engine ")))

    def _begin(self, role: str, lost: list[str], error: KeepstepError) -> float:
        settings = self.session.config.recovery
        verified = max(verified_steps(self.session.run), default=0)
        if self.session.config.trainer.debug or not settings.in_place or not self.budget.take(verified):
            raise error
        logger.warning(
            "%s: replaced in place (%d in a row of at most %d)", error.message, self.budget.used, settings.max_in_a_row
        )
        self.session.events.emit("worker_lost", role=role, lost=lost, reason=error.message)
        return time.monotonic()

    def _end(self, role: str, begin: float) -> None:
        self.session.events.emit("recovered", role=role, seconds=round(time.monotonic() - begin, 3))
        if self.session.config.recovery.warm_spare:
            self.workforce.stand_by()
