"""Staging on all nodes side by side, before a resume: one Ray task per node, on that node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keepstep.checkpoint.stage import clear, stage
from keepstep.controller.groups import RankGroup
from keepstep.controller.supervision import Supervisor


@contextmanager
def staged(
    folder: Path, stage_dir: str | None, run_id: str, ranks: RankGroup, supervisor: Supervisor, timeout_s: float
) -> Iterator[list[str | None]]:
    """Per rank its node's own copy of `folder`, while it is loaded; None everywhere without a `stage_dir`.

    Raises:
        CheckpointError: a node read something else than the manifest says.
        NoProgressError: a node did not answer within `timeout_s`.
    """
    nodes = ranks.by_node()
    world_size = len(ranks.actors)
    if stage_dir is None:
        yield [None] * world_size
        return

    def everywhere(function: Callable[..., Any], arguments: dict[str, tuple[Any, ...]]) -> list[Any]:
        calls = [(f"node {node[:8]}", start_on(node, function, *arguments[node])) for node in nodes]
        return supervisor.gather(calls, timeout_s, f"staging {folder}")

    try:
        copies = everywhere(stage, {n: (folder, stage_dir, run_id, own, world_size) for n, own in nodes.items()})
        of_node = dict(zip(nodes, copies, strict=True))
        yield [str(of_node[identity["node_id"]]) for identity in ranks.identities]
    finally:
        everywhere(clear, dict.fromkeys(nodes, (stage_dir, run_id)))


def start_on(node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Reference to what `function` gives on that node; it asks for no core."""
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
    return task.remote(*arguments)
