"""GPUs of tensor-parallel engines, on a Ray whose GPUs are numbers in its books."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.controller import cluster as cluster_module
from keepstep.controller import placement
from keepstep.controller.cluster import LOCAL_ENVIRONMENT, Cluster
from keepstep.errors import FencedError, NoProgressError
from keepstep.run import RunDir

pytestmark = pytest.mark.integration
NUM_GPUS = 4


class Stands:
    """In place of a rank or an engine: says which GPUs it sees."""

    def __init__(self, *_: Any) -> None: ...

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class FakeAttempt:
    number = 1

    def check(self) -> None: ...


def config(output: Path, num_engines: int, timeout_s: float, *more: str) -> RunConfig:
    return load("quickstart", [
        f"trainer.output_dir={output}", f"trainer.n_gpus_per_node={NUM_GPUS}", f"timeouts.start_s={timeout_s}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"actor_rollout_ref.rollout.num_engines={num_engines}", *more,
    ])  # fmt: skip


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local Ray that believes in four GPUs, and workers that compute nothing."""
    os.environ.update(LOCAL_ENVIRONMENT)
    import ray

    ray.init(address="local", include_dashboard=False, num_cpus=8, num_gpus=NUM_GPUS, log_to_driver=False)
    monkeypatch.setattr(Cluster, "_connect", lambda self: None)
    monkeypatch.setattr(cluster_module, "RankWorker", Stands)
    monkeypatch.setattr(cluster_module, "EngineWorker", Stands)
    yield
    ray.shutdown()


def test_engines_see_the_gpus_of_their_ranks(books: None, tmp_path: Path):
    """Four ranks with a GPU each; two engines with two each, of which none is another's; a new one has the same.

    What cannot be placed is named, and whoever lost the run meanwhile does not wait for it.
    """
    import ray

    attempt: Any = FakeAttempt()
    run_config = config(tmp_path, num_engines=2, timeout_s=60)
    cluster = Cluster(run_config, RunDir.at(tmp_path), attempt, "cuda")
    cluster.start()
    engines = [cluster.engine(index) for index in range(2)]
    ranks = [cluster.rank() for _ in range(NUM_GPUS)]
    sees = ray.get([actor.gpus.remote() for actor in [*ranks, *engines]], timeout=60)
    assert sorted(sees[:NUM_GPUS]) == ["0", "1", "2", "3"]
    assert sorted(gpu for seen in sees[NUM_GPUS:] for gpu in seen.split(",")) == ["0", "1", "2", "3"]
    assert [len(seen.split(",")) for seen in sees[NUM_GPUS:]] == [2, 2]
    ray.kill(engines[1])
    again = cluster.engine(1)
    assert ray.get(again.gpus.remote(), timeout=60) == sees[-1]

    with pytest.raises(NoProgressError, match=r"No 3 times 2 free GPUs, each on one node, within 1 s; .* has 4"):
        placement.Placement.reserve(config(tmp_path, num_engines=3, timeout_s=1), lambda: None)

    def fenced() -> None:
        raise FencedError("A newer attempt took the run over.")

    with pytest.raises(FencedError):
        placement.Placement.reserve(config(tmp_path, num_engines=3, timeout_s=60), fenced)


@pytest.mark.parametrize(("size", "num_engines"), [(2, 1), (1, 2)])
def test_engines_that_do_not_share_have_gpus_that_no_rank_sees(
    books: None, tmp_path: Path, size: int, num_engines: int
):
    """Two ranks with a GPU each; one engine over the other two, or two engines with one each."""
    import ray

    attempt: Any = FakeAttempt()
    run_config = config(
        tmp_path, num_engines, 60, "actor_rollout_ref.hybrid_engine=false", "trainer.n_gpus_per_node=2",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
    )  # fmt: skip
    cluster = Cluster(run_config, RunDir.at(tmp_path), attempt, "cuda")
    cluster.start()
    actors = [cluster.rank() for _ in range(2)] + [cluster.engine(index) for index in range(num_engines)]
    sees = ray.get([actor.gpus.remote() for actor in actors], timeout=60)
    assert sorted(gpu for seen in sees for gpu in seen.split(",")) == ["0", "1", "2", "3"]
    assert [len(seen.split(",")) for seen in sees] == [1, 1] + [size] * num_engines
