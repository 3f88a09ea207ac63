"""A worker that dies while the answer of another is awaited is seen at once; one that hangs is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.errors import NoProgressError, WorkerDiedError
from keepstep.processes import ProcessRef

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NOTICED_S = 5.0


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Any, Any]]:
    """Two actors of a local Ray."""
    from keepstep.controller.cluster import LOCAL_ENVIRONMENT

    os.environ.update(LOCAL_ENVIRONMENT)
    import ray

    @ray.remote(max_restarts=0)
    class Worker:
        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> str:
            time.sleep(seconds)
            return "done"

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    found = Worker.remote(), Worker.remote()
    ray.get([worker.pid.remote() for worker in found], timeout=60)
    yield found
    ray.shutdown()


def test_rank_0_that_hangs_in_the_weights_is_no_engine(workers: tuple[Any, Any]):
    """The others may have sent theirs; an engine that is given the reference would wait for it within its own call."""
    import ray

    from keepstep.config.schema import TimeoutConfig
    from keepstep.controller.groups import RankGroup
    from keepstep.controller.supervision import Supervisor

    @dataclass
    class Rank:
        full_weights: Any

    first, _ = workers

    def weights(actor: Any, dtype: str) -> Any:
        return actor.work.remote(3 * (actor is first))

    ranks = [Rank(SimpleNamespace(remote=partial(weights, actor))) for actor in workers]
    group = RankGroup(ranks, [], Supervisor(lambda: None), TimeoutConfig(step_s=1))
    with pytest.raises(NoProgressError, match="gathering weights: no answer from rank 0") as late:
        group.full_weights("float32")
    assert late.value.roles == {"rank 0"}
    ray.get(first.pid.remote(), timeout=60)
    alone = RankGroup(ranks[1:], [], Supervisor(lambda: None), TimeoutConfig())
    assert ray.get(alone.full_weights("float32"), timeout=60) == "done"


def test_a_rank_that_hangs_while_it_is_copied_is_named(workers: tuple[Any, Any]):
    """A save waits for the copies alone, not for what they hold; the same limit as that of any call to the ranks."""
    from keepstep.config.schema import TimeoutConfig
    from keepstep.controller.groups import RankGroup
    from keepstep.controller.supervision import Supervisor

    group = RankGroup([], [], Supervisor(lambda: None), TimeoutConfig(step_s=1))
    slow, quick = workers
    group.await_copies([slow.work.remote(0), quick.work.remote(0)], [])
    with pytest.raises(NoProgressError, match="copying the state: no answer from rank 1 within 1 s") as late:
        group.await_copies([quick.work.remote(0), slow.work.remote(3)], [])
    assert late.value.roles == {"rank 1"}


def test_who_hangs_and_who_died(workers: tuple[Any, Any]):
    import ray

    from keepstep.controller.supervision import Supervisor, Watched

    busy, idle = workers
    pids = ray.get([busy.pid.remote(), idle.pid.remote()], timeout=60)
    supervisor = Supervisor(lambda: None)
    for role, actor, pid in zip(("engine 0", "rank 1"), workers, pids, strict=True):
        process = ProcessRef.of(pid, role)
        assert process is not None
        supervisor.watched[role] = Watched(actor._actor_id.hex(), process)

    def see(gone: set[str], what: str) -> None:
        raise WorkerDiedError(f"{what}: {gone}").of(gone)

    supervisor.see = see
    assert supervisor.gather([("engine 0", busy.work.remote(1.5))], 30, "rollout") == ["done"]

    with pytest.raises(NoProgressError, match="rollout: no answer from engine 0 within 1 s") as late:
        supervisor.gather([("engine 0", busy.work.remote(3))], 1, "rollout")
    assert late.value.roles == {"engine 0"}

    call = [("engine 0", busy.work.remote(60))]
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError) as died:
        supervisor.gather(call, 60, "rollout")
    assert died.value.roles == {"rank 1"} and time.monotonic() - begin < NOTICED_S

    supervisor.watched.clear()
    begin = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"rollout: engine 0 died\.") as died:
        supervisor.gather(call, 60, "rollout")
    assert died.value.roles == {"engine 0"} and time.monotonic() - begin < NOTICED_S
