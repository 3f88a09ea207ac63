"""What a failed call of a worker is taken for."""

from __future__ import annotations

import pytest
import ray.exceptions

from keepstep.controller.supervision import classify
from keepstep.errors import BugError, OutOfMemoryError, WorkerDiedError

GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    "words",
    ["Read error [127.0.0.1]:53653: Connection reset by peer. This is typically caused by a remote worker hanging",
     "Connection closed by peer [127.0.0.1]:40001", "writev [127.0.0.1]:40001: Broken pipe"],
)  # fmt: skip
def test_a_collective_that_lost_its_peer_is_no_bug(words: str):
    """Rank 0, killed while the others gather the weights for the engines: nobody waits for an answer of its own."""
    assert isinstance(classify(RuntimeError(GLOO + words), "gathering weights"), WorkerDiedError)


def test_a_connection_of_somebody_elses_is_a_bug():
    """A reward function's server, for one."""
    assert isinstance(classify(ConnectionResetError("Connection reset by peer"), "rollout"), BugError)


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.NodeDiedError("gone"), ray.exceptions.WorkerCrashedError(), ray.exceptions.LocalRayletDiedError(),
     ray.exceptions.RuntimeEnvSetupError("the agent is gone")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_ray_says_of_a_node_that_is_gone_is_no_bug(error: Exception):
    assert isinstance(classify(error, "update"), WorkerDiedError)


def test_a_worker_that_ray_ended_for_its_memory():
    assert isinstance(classify(ray.exceptions.OutOfMemoryError("95 % used"), "update"), OutOfMemoryError)
