"""GPUs of ranks and engines, on a Ray whose GPUs are numbers in its books."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.controller import cluster as cluster_module
from keepstep.controller import placement
from keepstep.controller.cluster import LOCAL_ENVIRONMENT, Cluster, num_cpus
from keepstep.errors import FencedError, NoProgressError
from keepstep.run import RunDir

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NUM_GPUS = 4


class Stands:
    """In place of a rank or an engine: says which GPUs it sees."""

    def __init__(self, *_: Any) -> None: ...

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class FakeAttempt:
    number = 1

    def check(self) -> None: ...


def config(output: Path, num_ranks: int, num_engines: int, size: int, *more: str) -> RunConfig:
    return load("quickstart", [
        f"trainer.output_dir={output}", f"trainer.n_gpus_per_node={num_ranks}", "timeouts.start_s=60",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
        f"actor_rollout_ref.rollout.num_engines={num_engines}", *more,
    ])  # fmt: skip


Books = Callable[[RunConfig], Cluster]


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Books]:
    """A local Ray that believes in four GPUs, with as many cores as it counts itself; workers compute nothing."""
    os.environ.update(LOCAL_ENVIRONMENT)
    import ray

    monkeypatch.setattr(Cluster, "_connect", lambda self: None)
    monkeypatch.setattr(cluster_module, "RankWorker", Stands)
    monkeypatch.setattr(cluster_module, "EngineWorker", Stands)

    def start(run_config: RunConfig) -> Cluster:
        cpus = num_cpus(run_config)
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, num_gpus=NUM_GPUS, log_to_driver=False)
        attempt: Any = FakeAttempt()
        cluster = Cluster(run_config, RunDir.at(tmp_path), attempt, "cuda")
        cluster.start()
        return cluster

    yield start
    ray.shutdown()


def seen_by(actors: list[Any]) -> list[set[str]]:
    import ray

    return [set(seen.split(",")) for seen in ray.get([actor.gpus.remote() for actor in actors], timeout=60)]


ALL = {"0", "1", "2", "3"}


@pytest.mark.parametrize(("num_engines", "size"), [(4, 1), (2, 2)])
def test_engines_share_the_gpus_of_ranks_and_no_two_of_a_kind_share_one(
    books: Books, tmp_path: Path, num_engines: int, size: int
):
    """Engines are asked for first, as in a start: Ray by itself would put two of them on one GPU."""
    cluster = books(config(tmp_path, NUM_GPUS, num_engines, size))
    engines = [cluster.engine(index) for index in range(num_engines)]
    ranks = [cluster.rank(rank) for rank in range(NUM_GPUS)]
    of_ranks, of_engines = seen_by(ranks), seen_by(engines)
    assert set.union(*of_ranks) == ALL and all(len(seen) == 1 for seen in of_ranks)
    assert all(len(seen) == size for seen in of_engines)
    assert len(set.union(*of_engines)) == num_engines * size


@pytest.mark.parametrize(("num_engines", "size"), [(1, 2), (2, 1)])
def test_engines_that_do_not_share_have_gpus_that_no_rank_sees(
    books: Books, tmp_path: Path, num_engines: int, size: int
):
    """Two ranks with a GPU each; one engine over the other two, or two engines with one each."""
    cluster = books(config(tmp_path, 2, num_engines, size, "actor_rollout_ref.hybrid_engine=false"))
    engines = [cluster.engine(index) for index in range(num_engines)]
    sees = seen_by([*engines, *(cluster.rank(rank) for rank in range(2))])
    assert set.union(*sees) == ALL and sum(map(len, sees)) == NUM_GPUS
    assert [len(seen) for seen in sees] == [size] * num_engines + [1, 1]


def test_a_new_engine_has_the_gpus_of_the_lost_one_and_what_cannot_be_placed_is_named(books: Books, tmp_path: Path):
    """And whoever lost the run meanwhile does not wait for it."""
    import ray

    cluster = books(config(tmp_path, NUM_GPUS, 2, 2))
    engines = [cluster.engine(index) for index in range(2)]
    before = seen_by(engines)
    ray.kill(engines[1])
    assert seen_by([cluster.engine(1)]) == before[1:]

    too_many = config(tmp_path, NUM_GPUS, 3, 2, "timeouts.start_s=1")
    with pytest.raises(NoProgressError, match=r"No 6 free GPUs for 4 ranks and 3 engines of 2, .* 1 s; .* has 4\."):
        placement.Placement.reserve(too_many, lambda: None)
    apart = config(tmp_path, NUM_GPUS, 1, 1, "timeouts.start_s=1", "actor_rollout_ref.hybrid_engine=false")
    with pytest.raises(NoProgressError, match=r"No 5 free GPUs .* with GPUs of their own"):
        placement.Placement.reserve(apart, lambda: None)

    def fenced() -> None:
        raise FencedError("A newer attempt took the run over.")

    with pytest.raises(FencedError):
        placement.Placement.reserve(config(tmp_path, NUM_GPUS, 3, 2), fenced)
