"""Ray: the local cluster of one attempt, or the cluster that this process runs on as a Ray job."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keepstep.actor.environment import rank_environment
from keepstep.attempts import Attempt
from keepstep.config.schema import RunConfig
from keepstep.controller.placement import Placement, bundles
from keepstep.controller.reporting import logger
from keepstep.controller.workers import EngineWorker, RankWorker, Worker, WriterWorker
from keepstep.errors import NoProgressError, first_line
from keepstep.processes import ProcessRef, descendants, terminate
from keepstep.rollout.environment import engine_environment
from keepstep.run import RunDir

# Ray reads these on import of its parts, so they are set before `ray.init`.
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",
    # Ray's default of 15 would starve ranks and engine next to anything else on the machine.
    "RAY_worker_niceness": "0",
    # A call after the end would quietly start another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
RAY_WAITED = "timed out during startup"
"""Ray's word on a raylet that was not up in 30 s."""


def num_cpus(config: RunConfig) -> int:
    """What a local Ray counts: each rank and each worker of an engine asks for one, spares as well. Pure."""
    return sum(bundle["CPU"] for bundle in bundles(config)) * (2 if config.recovery.warm_spare else 1)


class Cluster:
    """Starts and ends the processes of an attempt and records each."""

    def __init__(self, config: RunConfig, run: RunDir, attempt: Attempt, device: str) -> None:
        self._config = config
        self._run = run
        self._attempt = attempt
        self._device = device
        self._local = config.ray.address is None
        self._temp_dir = run.temporary(attempt.number)
        self._node_of: dict[str, str] = {}
        self._environment: dict[str, str] = {}
        self._placement: Placement | None = None
        """None on CPUs."""

    def start(self) -> None:
        """Connect to Ray, starting a local one unless a cluster is given, and have the GPUs.

        Raises:
            NoProgressError: Ray does not start, or does not have them in time.
        """
        self._connect()
        if self._device == "cuda":
            self._placement = Placement.reserve(self._config, self._attempt.check)

    def _connect(self) -> None:
        # By their names: of attempts in a folder that was lost since there is no other trace.
        stem = self._temp_dir.name.rpartition("-")[0]
        for folder in self._temp_dir.parent.glob(f"{stem}-*"):
            if folder != self._temp_dir:
                shutil.rmtree(folder, ignore_errors=True)
        if not self._local:
            ray.init(address="auto", log_to_driver=True, namespace=f"keepstep-{self._run.default_s3_prefix}")
            return
        os.environ.update(LOCAL_ENVIRONMENT)
        # What a killed worker leaves in the folder for temporary files goes with the attempt's own.
        self._environment = {"TMPDIR": str(self._temp_dir / "tmp")}
        (self._temp_dir / "tmp").mkdir(parents=True, exist_ok=True)
        self._start_local()
        self.record_services()

    def _start_local(self) -> None:
        """Start Ray, as often as `timeouts.start_s` allows: its own limit is half a minute, and nothing raises it."""
        deadline = time.monotonic() + self._config.timeouts.start_s
        while True:
            try:
                return self._init()
            except Exception as error:
                # A machine that is overloaded, as a rule: nothing of ours runs yet.
                if RAY_WAITED not in str(error) or time.monotonic() > deadline:
                    message = f"Ray did not start here: {first_line(error)}"
                    raise NoProgressError(message, "See what else the machine does.") from error
                logger.warning("Ray did not start within half a minute; once more")
            self._attempt.check()
            self._end_unrecorded()

    def _init(self) -> None:
        ray.init(
            address="local",
            include_dashboard=False,
            _temp_dir=str(self._temp_dir),
            # A logical count: each rank and each worker of an engine asks for one, whatever the machine has.
            num_cpus=num_cpus(self._config),
            object_store_memory=self._config.ray.object_store_bytes,
            log_to_driver=False,
            # Every actor needs an environment of its own, so workers started in advance would never be used.
            _system_config={"prestart_worker_first_driver": False},
        )

    def rank(self, rank: int) -> Any:
        """A process for a rank, to be built."""
        options = {} if self._placement is None else self._placement.rank_options(rank)
        return self._actor(RankWorker, rank_environment(self._device), **options).remote()

    def engine(self, index: int) -> Any:
        """A process for engine `index`, to be built."""
        rollout = self._config.actor_rollout_ref.rollout
        environment = engine_environment(rollout, self._device, index)
        options: dict[str, Any] = {"num_cpus": rollout.tensor_model_parallel_size}
        if self._placement is not None:
            options |= self._placement.engine_options(index)
            environment |= self._placement.engine_environment(index)
        return self._actor(EngineWorker, environment, **options).remote(rollout, self._device)

    def writer(self, node_id: str) -> Any:
        """A writer on this node. It asks for no core of its own: it works behind the others."""
        pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": pinned}
        return self._actor(WriterWorker, {"OMP_NUM_THREADS": "1"}, **options).remote()

    def own_node_id(self) -> str:
        """The node of this process, where a run's folder is read back."""
        return ray.get_runtime_context().get_node_id()

    def record(self, role: str, rank: int | None, identity: dict[str, Any]) -> list[ProcessRef]:
        """Put an actor's process into the attempt's record, and the workers of an engine with it; all of these.

        The last one recorded stands in this place.
        """
        if role != "spare":
            # A spare that is taken away costs nothing.
            self._node_of[f"{role} {rank}"] = identity["node_id"]
        host = identity["host"]
        refs = [ProcessRef(role, identity["pid"], identity["start_time"], host, rank)]
        refs += [ProcessRef(f"{role}-worker", pid, started, host, rank) for pid, started in identity.get("workers", [])]
        for ref in refs:
            self._attempt.add_remote(ref)
        return refs

    def by_node(self) -> dict[str, list[str]]:
        """What of this attempt runs on which node: `rank 1`, `engine 0`, `controller`. From any thread."""
        found: dict[str, list[str]] = {}
        for worker, node_id in [*dict(self._node_of).items(), ("controller", self.own_node_id())]:
            found.setdefault(node_id, []).append(worker)
        return found

    def record_services(self) -> None:
        """Record what runs below this process and is not recorded yet: Ray's own services.

        Called after `ray.init`, when there are no actors yet, and again when all actors are recorded.
        """
        for pid in self._unrecorded() if self._local else ():
            self._attempt.add(pid, "ray")

    def _unrecorded(self) -> list[int]:
        known = {ref.pid for ref in self._attempt.processes()}
        return [pid for pid in descendants(os.getpid()) if pid not in known]

    def _end_unrecorded(self) -> None:
        """End what a Ray that did not start has left: it forgets its processes."""
        with contextlib.suppress(Exception):
            ray.shutdown()
        refs = [ProcessRef.of(pid, "ray") for pid in self._unrecorded()]
        terminate([ref for ref in refs if ref is not None])

    def stop(self) -> None:
        """End Ray (a local one as a whole) and remove its folder."""
        with contextlib.suppress(Exception):
            ray.shutdown()
        if self._local:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _actor(self, worker: type[Worker], environment: dict[str, str], **options: Any) -> Any:
        variables = self._environment | environment
        settings = {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
        return ray.remote(worker).options(**(settings | options))
