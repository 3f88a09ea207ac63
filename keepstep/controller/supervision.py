"""Waiting for remote work: always with a time limit, always telling which role failed.

Ray reports a dead actor to whoever waits for its answer, and a hung one never: so every wait has a deadline, and the
processes that nobody waits for right now (ranks during a rollout) are looked at as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.state
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from keepstep import errors
from keepstep.controller.reporting import logger
from keepstep.processes import ProcessRef

POLL_S = 0.5
WATCH_S = 1.0
LOST = (
    RayActorError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError, ObjectLostError, RuntimeEnvSetupError,
    # What is pinned to a node that is gone.
    ActorUnschedulableError, TaskUnschedulableError,
)  # fmt: skip
"""Ray's words on a process, or its node, that is gone."""
CAUSE_PATIENCE_S = 3.0


@dataclass(frozen=True)
class Watched:
    """A worker: its Ray actor and its process."""

    actor_id: str
    process: ProcessRef
    workers: tuple[ProcessRef, ...] = ()
    """Processes that it started, of a tensor-parallel engine."""


class Supervisor:
    """Gathers results of remote calls; `check` is called while waiting and may raise (fenced, asked to leave)."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self.watched: dict[str, Watched] = {}
        """Workers by role that are looked at during every wait, whomever it is for."""
        self.see: Callable[[set[str], str], None] = lambda _gone, _what: None
        """Told which of them have ended while another's answer is waited for, and what for; may raise."""
        self.answered: Callable[[], None] = lambda: None
        """Told of every answer."""
        self._looked = 0.0

    def gather(self, calls: Sequence[tuple[str, Any]], timeout_s: float, what: str, *, fetch: bool = True) -> list[Any]:
        """Results of (role, reference) pairs, in order.

        Args:
            fetch: False: wait until they are there, and leave them where they are, failures as well; each is None.

        Raises:
            WorkerDiedError: a process went away, with its role.
            NoProgressError: not all answered within `timeout_s`.
            KeepstepError: what the remote code raised, if it is one of ours.
        """
        role_of = {reference: role for role, reference in calls}
        results: dict[Any, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < len(role_of):
            pending = [reference for reference in role_of if reference not in results]
            self._check()
            if gone := self._gone() - {role_of[reference] for reference in pending}:
                self.see(gone, what)
            if time.monotonic() > deadline:
                late = {role_of[reference] for reference in pending}
                message = f"{what}: no answer from {', '.join(sorted(late))} within {timeout_s:.0f} s."
                raise errors.NoProgressError(message).of(late)
            ready, _ = ray.wait(pending, num_returns=1, timeout=POLL_S, fetch_local=fetch)
            for reference in ready:
                self.answered()
                try:
                    results[reference] = ray.get(reference) if fetch else None
                except RayError as error:
                    raise self._diagnose(error, role_of, reference, pending, what) from error
        return [results[reference] for _, reference in calls]

    def _gone(self) -> set[str]:
        """Watched roles whose process has ended, on whatever node; Ray is asked every `WATCH_S`."""
        if not self.watched or time.monotonic() - self._looked < WATCH_S:
            return set()
        self._looked = time.monotonic()
        try:
            dead = ray._private.state.actors(
                job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()), actor_state_name="DEAD"
            )
        except Exception as error:
            # A cluster that does not answer is noticed by whoever waits for one of its workers.
            logger.debug("Ray does not tell which actors are dead: %s", error)
            return set()
        return {role for role, watched in self.watched.items() if watched.actor_id in dead}

    def _diagnose(
        self, error: Exception, role_of: dict[Any, str], failed: Any, pending: list[Any], what: str
    ) -> errors.KeepstepError:
        """The cause of a failed call. A rank that lost its peer fails too: the peer's death is the cause to report."""
        dead = self._dead_roles(role_of, pending, patience_s=CAUSE_PATIENCE_S)
        if dead:
            # Not in the message, which is compared from attempt to attempt: it names processes and nodes.
            causes = " ".join(sorted(set(dead.values())))
            message = f"{what}: {', '.join(sorted(dead))} died."
            return errors.WorkerDiedError(message, f"Ray says: {causes}").of(dead)
        found = classify(error, what)
        lost = isinstance(found, errors.WorkerDiedError | errors.NoProgressError)
        return found.of([role_of[failed]]) if lost and not found.roles else found

    def _dead_roles(self, role_of: dict[Any, str], pending: list[Any], patience_s: float) -> dict[str, str]:
        """Role to Ray's own word on its death."""
        deadline = time.monotonic() + patience_s
        dead: dict[str, str] = {}
        remaining = list(pending)
        while remaining and not dead and time.monotonic() < deadline:
            ready, remaining = ray.wait(remaining, num_returns=1, timeout=POLL_S)
            for reference in ready:
                try:
                    ray.get(reference)
                except (ActorDiedError, ActorUnavailableError) as death:
                    dead[role_of[reference]] = errors.last_line(death)
                except Exception:
                    continue
        return dead


LOST_PEER = re.compile(r"Connection closed by peer|gloo\b.*(Connection reset by peer|Broken pipe)", re.DOTALL)
"""What a collective says of a rank that died, whatever it was doing then."""


def classify(error: BaseException, what: str) -> errors.KeepstepError:
    """Our error for whatever a remote call raised."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, errors.KeepstepError):
        return cause
    if isinstance(error, LOST):
        return errors.WorkerDiedError(f"{what}: a worker died ({errors.last_line(error)}).")
    if isinstance(cause, OutOfMemoryError) or errors.is_out_of_memory(cause):
        return errors.OutOfMemoryError(f"{what}: out of memory ({errors.last_line(cause)}).")
    if isinstance(cause, OSError) and cause.errno in errors.NO_ROOM_ERRNOS:
        return errors.NoRoomError(
            f"{what}: no room on the filesystem ({cause}).", "Free space or lower checkpoint.keep_last."
        )
    if LOST_PEER.search(str(cause)):
        return errors.WorkerDiedError(f"{what}: a peer of the group went away ({errors.last_line(cause)}).")
    if "Timed out waiting" in str(cause):
        return errors.NoProgressError(f"{what}: a peer of the group did not answer ({errors.last_line(cause)}).")
    return errors.BugError(f"{what}: {type(cause).__name__}: {errors.last_line(cause)}")
