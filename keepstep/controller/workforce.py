"""Starting ranks and engines: fresh processes, or spare ones that have imported everything already.

`start_*` return at once and the processes import side by side; `ranks` and `engine` wait for them, put them into the
attempt's record and have them watched.

Concurrency: used by the loop's thread. One thread per `stand_by` waits until the spares are up (timeouts.start_s), has
them recorded and puts them where the loop finds them; the loop never waits for it.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from keepstep.controller.cluster import Cluster
from keepstep.controller.reporting import logger
from keepstep.controller.supervision import Supervisor, Watched
from keepstep.errors import first_line
from keepstep.processes import kill

Identity = dict[str, Any]


class Workforce:
    """The processes that compute, of one attempt."""

    def __init__(
        self,
        cluster: Cluster,
        supervisor: Supervisor,
        *,
        specs: list[Any],
        model_dir: str,
        max_model_len: int,
        num_engines: int,
        engines_sleep: bool,
        timeout_s: float,
    ) -> None:
        """
        Args:
            specs: a `RankSpec` per rank.
            max_model_len: tokens of the longest prompt with its response.
            engines_sleep: they are asked to, while the ranks train.
            timeout_s: longest time that a process may take to come up.
        """
        self._cluster, self._supervisor, self._timeout_s = cluster, supervisor, timeout_s
        self._specs = specs
        self._engine_of = (model_dir, max_model_len, engines_sleep)
        self._num_engines = num_engines
        self._starting: dict[str, tuple[Any, Any]] = {}
        """Role to (actor, reference to its identity once it is built)."""
        self._spares: dict[str, Any] = {}
        """Processes that stand by, by the role that they would take."""
        self._coming: set[str] = set()

    def start_ranks(self) -> None:
        for spec in self._specs:
            role = f"rank {spec.rank}"
            actor = self._spares.pop(role, None) or self._cluster.rank(spec.rank)
            self._starting[role] = (actor, actor.build.remote(spec))

    def ranks(self) -> tuple[list[Any], list[Identity]]:
        """Actors and identities of the ranks that were started, in order.

        Raises:
            WorkerDiedError, NoProgressError: one did not come up.
        """
        return self._up([f"rank {spec.rank}" for spec in self._specs], "starting the ranks")

    def start_engine(self, index: int) -> None:
        role = f"engine {index}"
        actor = self._spares.pop(role, None) or self._cluster.engine(index)
        self._starting[role] = (actor, actor.build.remote(*self._engine_of))

    def engine(self, index: int) -> Any:
        """The actor of the engine that was started.

        Raises:
            WorkerDiedError, NoProgressError: it did not come up.
        """
        actors, _ = self._up([f"engine {index}"], "starting the engines")
        return actors[0]

    def end(self, role: str, actor: Any) -> None:
        """End a worker, also one that hangs: Ray asks it to go, which a stopped process never hears."""
        watched = self._supervisor.watched.pop(role, None)
        ray.kill(actor)
        # Its workers would go with it, but not one that is stopped.
        kill([watched.process, *watched.workers] if watched is not None else [])

    def stand_by(self) -> None:
        """Start the missing spare processes: one for each rank, since all are replaced together, and engine."""
        kinds = {f"rank {spec.rank}": partial(self._cluster.rank, spec.rank) for spec in self._specs}
        kinds |= {f"engine {index}": partial(self._cluster.engine, index) for index in range(self._num_engines)}
        missing = {
            role: start() for role, start in kinds.items() if role not in self._spares and role not in self._coming
        }
        self._coming |= set(missing)
        threading.Thread(target=self._wait_for_spares, args=(missing,), name="spares", daemon=True).start()

    def _up(self, roles: list[str], what: str) -> tuple[list[Any], list[Identity]]:
        started = [self._starting[role] for role in roles]
        calls = [(role, built) for role, (_, built) in zip(roles, started, strict=True)]
        identities = self._supervisor.gather(calls, self._timeout_s, what)
        # Not before: when the wait is broken off, by the death of others, they are asked for again.
        for role, identity, (actor, _) in zip(roles, identities, started, strict=True):
            del self._starting[role]
            kind, _, number = role.partition(" ")
            process, *workers = self._cluster.record(kind, int(number), identity)
            self._supervisor.watched[role] = Watched(actor._actor_id.hex(), process, tuple(workers))
        return [actor for actor, _ in started], identities

    def _wait_for_spares(self, started: dict[str, Any]) -> None:
        for role, actor in started.items():
            try:
                identity = ray.get(actor.identity.remote(), timeout=self._timeout_s)
            except RayError as error:
                logger.warning("the spare of %s did not come up: %s", role, first_line(error))
            else:
                self._cluster.record("spare", None, identity)
                self._spares[role] = actor
                megabytes = identity["rss_bytes"] / 1e6
                logger.info("a spare of %s stands by: process %d, %.0f MB", role, identity["pid"], megabytes)
            self._coming.discard(role)
