"""Which GPUs ranks and engines compute on.

Left to itself Ray packs shares of GPUs as tightly as they go: two engines on one GPU, and no place for a rank. So all
GPUs are reserved at once by a placement group, in bundles that are each of one node: one per engine, of as many GPUs as
it divides the model over. Ranks that share these stand in the same bundles, one to a GPU; others have bundles of their
own.

Ray gives an actor whole GPUs or a share of one, never shares of several. So an engine over several asks for none, and
is told by its environment which ones its bundle holds, beside the ranks that have them as well. Its workers are
processes below it, as on a CPU.
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
RANK_GPU_SHARE, ENGINE_GPU_SHARE = 0.6, 0.4
"""Of a GPU, in Ray's books, where a rank and an engine share it."""


@dataclass(frozen=True)
class Bundle:
    """What the placement group holds for one engine, or for one rank."""

    node_id: str
    gpus: tuple[str, ...]


def bundles(config: RunConfig) -> list[dict[str, int]]:
    """What is asked of Ray, in order of the engines; on a CPU its cores alone count. Pure."""
    rollout, num_ranks = config.actor_rollout_ref.rollout, config.world_size
    size, num_engines = rollout.tensor_model_parallel_size, rollout.num_engines
    if not config.actor_rollout_ref.hybrid_engine:
        return [{"GPU": size, "CPU": size}] * num_engines + [{"GPU": 1, "CPU": 1}] * num_ranks
    count = max(-(-num_ranks // size), num_engines)
    # A core for each rank, and for each worker of an engine.
    return [{"GPU": size, "CPU": size * (2 if index < num_engines else 1)} for index in range(count)]


class Placement:
    """The GPUs of an attempt in Ray's books."""

    def __init__(self, group: PlacementGroup, found: list[Bundle], config: RunConfig) -> None:
        self._group = group
        self._found = found
        self._size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self._num_engines = config.actor_rollout_ref.rollout.num_engines
        self._shared = config.actor_rollout_ref.hybrid_engine

    @classmethod
    def reserve(cls, config: RunConfig, check: Callable[[], None]) -> Placement:
        """Wait until the cluster has the GPUs; `check` is called meanwhile and may raise.

        Raises:
            NoProgressError: it does not have them within timeouts.start_s.
        """
        asked, timeout_s = bundles(config), config.timeouts.start_s
        group = placement_group([dict(bundle) for bundle in asked], strategy="PACK")
        calls = [
            ray.remote(_look)
            .options(num_cpus=0, num_gpus=bundle["GPU"], scheduling_strategy=_in(group, index), max_retries=0)
            .remote()
            for index, bundle in enumerate(asked)
        ]
        deadline = time.monotonic() + timeout_s
        while len(ray.wait(calls, num_returns=len(calls), timeout=POLL_S)[0]) < len(calls):
            check()
            if time.monotonic() > deadline:
                raise _too_few(config, sum(bundle["GPU"] for bundle in asked))
        return cls(group, [Bundle(node_id, tuple(gpus)) for node_id, gpus in ray.get(calls)], config)

    def rank_options(self, rank: int) -> dict[str, Any]:
        """For the actor of a rank: on a GPU that is no other rank's."""
        if self._shared:
            return {"scheduling_strategy": _in(self._group, rank // self._size), "num_gpus": RANK_GPU_SHARE}
        return {"scheduling_strategy": _in(self._group, self._num_engines + rank), "num_gpus": 1}

    def engine_options(self, index: int) -> dict[str, Any]:
        """For the actor of engine `index`.

        Raises:
            WorkerDiedError: the GPUs that it divides a model over went with their node, and ranks may have taken some
                of those that came instead.
        """
        own = {"scheduling_strategy": _in(self._group, index)}
        if self._size == 1:
            return own | {"num_gpus": ENGINE_GPU_SHARE if self._shared else 1}
        now = placement_group_table(self._group)["bundles_to_node_id"].get(index)
        if now != self._found[index].node_id:
            raise WorkerDiedError(f"engine {index}: the node of its GPUs is gone; another attempt reserves others.")
        return own | {"num_gpus": 0}

    def engine_environment(self, index: int) -> dict[str, str]:
        """Variables by which an engine over several GPUs sees those of its bundle, and Ray leaves it at that."""
        if self._size == 1:
            return {}
        visible = ",".join(self._found[index].gpus)
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _too_few(config: RunConfig, num_asked: int) -> NoProgressError:
    rollout, there = config.actor_rollout_ref.rollout, ray.cluster_resources().get("GPU", 0)
    size, num_engines = rollout.tensor_model_parallel_size, rollout.num_engines
    engines = f"{num_engines} engines" + (f" of {size}, each on one node" if size > 1 else "")
    how = "sharing them" if config.actor_rollout_ref.hybrid_engine else "with GPUs of their own (hybrid_engine=false)"
    return NoProgressError(
        f"No {num_asked} free GPUs for {config.world_size} ranks and {engines}, {how}, within "
        f"{config.timeouts.start_s:.0f} s; the cluster has {there:.0f}.",
        f"Lower {SIZE_KEY} or actor_rollout_ref.rollout.num_engines, or start the nodes that are missing.",
    )


def _in(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _look() -> tuple[str, list[str]]:
    """(node, GPUs) of the bundle that this runs in."""
    import ray

    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]
