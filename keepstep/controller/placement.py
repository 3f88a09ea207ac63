"""Which GPUs a tensor-parallel engine computes on.

Ray gives an actor whole GPUs or a share of one, never shares of several. So the GPUs are reserved by a placement group:
each of its bundles is as many GPUs of one node as an engine has workers. An engine stands in its own bundle, asks for
no GPU, and is told by its environment which ones the bundle holds; ranks that share them take their part in the
bundles, others stand outside. Its workers are processes below it, as on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keepstep.config.schema import RunConfig
from keepstep.errors import NoProgressError, WorkerDiedError

POLL_S = 1.0
SIZE_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@dataclass(frozen=True)
class Bundle:
    """What the placement group holds for one engine."""

    node_id: str
    gpus: tuple[str, ...]


def bundles(config: RunConfig) -> list[dict[str, float]]:
    """What is asked of Ray, a bundle per engine and as many as the ranks need that share them. Pure."""
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    num_shared = -(-config.world_size // size) if config.actor_rollout_ref.hybrid_engine else 0
    count = max(num_shared, rollout.num_engines)
    return [{"GPU": size, "CPU": size * (2 if index < rollout.num_engines else 1)} for index in range(count)]


class Placement:
    """The GPUs of an attempt in Ray's books, for engines over several of them."""

    def __init__(self, group: PlacementGroup, found: list[Bundle], shared: bool) -> None:
        self._group = group
        self._found = found
        self._shared = shared

    @classmethod
    def reserve(cls, config: RunConfig, check: Callable[[], None]) -> Placement:
        """Wait until the cluster has the GPUs; `check` is called meanwhile and may raise.

        Raises:
            NoProgressError: it does not have them within timeouts.start_s.
        """
        asked, timeout_s = bundles(config), config.timeouts.start_s
        group = placement_group(asked, strategy="PACK")
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        calls = [
            ray.remote(_look)
            .options(num_cpus=0, num_gpus=size, scheduling_strategy=_in(group, index), max_retries=0)
            .remote()
            for index in range(len(asked))
        ]
        deadline = time.monotonic() + timeout_s
        while len(ray.wait(calls, num_returns=len(calls), timeout=POLL_S)[0]) < len(calls):
            check()
            if time.monotonic() > deadline:
                there = ray.cluster_resources().get("GPU", 0)
                raise NoProgressError(
                    f"No {len(asked)} times {size} free GPUs, each on one node, within {timeout_s:.0f} s; the cluster "
                    f"has {there:.0f}.",
                    f"Lower {SIZE_KEY} or actor_rollout_ref.rollout.num_engines, or start the nodes that are missing.",
                )
        found = [Bundle(node_id, tuple(gpus)) for node_id, gpus in ray.get(calls)]
        return cls(group, found, config.actor_rollout_ref.hybrid_engine)

    def rank_options(self) -> dict[str, Any]:
        """For an actor that takes its share of any of the GPUs, or one that the engines do not have."""
        return {"scheduling_strategy": _in(self._group, -1)} if self._shared else {}

    def engine_options(self, index: int) -> dict[str, Any]:
        """For the actor of engine `index`.

        Raises:
            WorkerDiedError: its GPUs went with their node, and the ranks may have taken those that came instead.
        """
        bundle = self._found[index]
        now = placement_group_table(self._group)["bundles_to_node_id"].get(index)
        if now != bundle.node_id:
            raise WorkerDiedError(f"engine {index}: the node of its GPUs is gone; another attempt reserves others.")
        return {"scheduling_strategy": _in(self._group, index), "num_gpus": 0}

    def engine_environment(self, index: int) -> dict[str, str]:
        """Variables by which engine `index` sees its GPUs, and Ray leaves it at that."""
        visible = ",".join(self._found[index].gpus)
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _in(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _look() -> tuple[str, list[str]]:
    """(node, GPUs) of the bundle that this runs in."""
    import ray

    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]
