"""The checks of every node of the job, made on that node.

`on_each_node` needs a connected Ray. `python -m keepstep.controller.nodes` is a Ray job that connects, asks every node
and prints the answers; `ask_cluster` submits it and reads them.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from keepstep.config.schema import RunConfig
from keepstep.controller.launch import job_output
from keepstep.errors import NoProgressError
from keepstep.preflight import node
from keepstep.preflight.checks import Check
from keepstep.preflight.node import Request

logger = logging.getLogger("keepstep")

REQUEST_VARIABLE = "KEEPSTEP_NODE_REQUEST"
ANSWER_PREFIX = "KEEPSTEP_NODE_ANSWERS "
TIMEOUT_S = 120.0


def on_each_node(asked: Request) -> list[Check]:
    """Every check on every living node that is not about to be taken away; one that dies meanwhile is left out.

    Raises:
        NoProgressError: a node does not answer.
    """
    import ray

    from keepstep.controller.staging import start_on

    nodes = _nodes("GPU" if asked.device == "cuda" else "CPU")
    token = f".preflight-{uuid.uuid4().hex}"
    shared = Path(asked.folder) / token
    try:
        # Asked from a head without a GPU, a single node is another one as well.
        if nodes.keys() - {ray.get_runtime_context().get_node_id()}:
            shared.touch()
            asked = replace(asked, token=token)
        calls = {start_on(node_id, _answers, asked): name for node_id, name in nodes.items()}
        begin = time.time()
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=TIMEOUT_S)
        if late:
            names = ", ".join(sorted(calls[call] for call in late))
            raise NoProgressError(f"No answer to the checks from {names} within {TIMEOUT_S:.0f} s.", "Look at them.")
        end = time.time()
        found = []
        for call, name in calls.items():
            try:
                said, answers = ray.get(call, timeout=TIMEOUT_S)
            except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError) as error:
                logger.warning("%s was lost while it was asked: %s", name, type(error).__name__)
                continue
            clock = node.answer_of(
                "node_clock", partial(node.judge_clock, begin, said, end, "the asking node", asked.max_skew_s)
            )
            found += [Check(**answer) for answer in [*answers, clock | {"node": name}]]
        return found
    finally:
        shared.unlink(missing_ok=True)


def _nodes(resource: str) -> dict[str, str]:
    """Id to host name of the nodes on which workers may stand: of a job on GPUs only those that have one."""
    import ray

    from keepstep.controller.draining import draining_nodes

    leaving = draining_nodes()
    alive = [entry for entry in ray.nodes() if entry["Alive"] and entry["Resources"].get(resource)]
    return {entry["NodeID"]: entry["NodeManagerHostname"] for entry in alive if entry["NodeID"] not in leaving}


def ask_cluster(config: RunConfig) -> Callable[[Request], list[Check]]:
    """How `preflight` asks the nodes of `ray.address`."""

    def ask(asked: Request) -> list[Check]:
        environment = {REQUEST_VARIABLE: json.dumps(asdict(asked))}
        lines = job_output(config, "python -m keepstep.controller.nodes", environment, 2 * TIMEOUT_S)
        answer = next((line for line in lines if line.startswith(ANSWER_PREFIX)), None)
        if answer is None:
            raise NoProgressError(
                f"The job that asks the nodes of {config.ray.address} gave no answer: {' '.join(lines[-3:])}",
                "Is this version of Keepstep installed on the cluster?",
            )
        return [Check(**record) for record in json.loads(answer.removeprefix(ANSWER_PREFIX))]

    return ask


def _answers(asked: Request) -> tuple[float, list[node.Answer]]:
    """(this node's time, its answers)."""
    return time.time(), node.answers(asked)


def main() -> None:
    import ray

    ray.init(address="auto", log_to_driver=False)
    found = on_each_node(Request(**json.loads(os.environ[REQUEST_VARIABLE])))
    print(ANSWER_PREFIX + json.dumps([check.to_record() for check in found]), flush=True)


if __name__ == "__main__":
    main()
