"""The quickstart on CUDA devices, which ranks and engines share. Run with `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.compare import differences
from tests.integration.driver import Driver

pytestmark = pytest.mark.gpu

OVERRIDES = [
    "trainer.device=cuda", "trainer.total_training_steps=12", "trainer.save_freq=5",
    "trainer.test_freq=-1", "s3.embedded=false", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "actor_rollout_ref.rollout.logprob_tolerance=0.05",
]  # fmt: skip


@pytest.mark.parametrize("num_gpus", [1, 2], ids=["one", "tensor parallel"])
def test_killed_run_on_gpus_ends_with_the_same_bytes(tmp_path: Path, num_gpus: int):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"fewer than {num_gpus} CUDA devices")
    size = f"actor_rollout_ref.rollout.tensor_model_parallel_size={num_gpus}"
    settings = [*OVERRIDES, f"trainer.n_gpus_per_node={num_gpus}", size]
    undisturbed, hit = (Driver(tmp_path / name, settings, command="train") for name in ("undisturbed", "hit"))
    assert undisturbed.run_to_end(600) == 0, undisturbed.tail()
    hit.start()
    hit.wait_for_step(8, timeout_s=300)
    hit.kill_command()
    assert hit.run_to_end(600) == 0, hit.tail()
    assert differences(hit.run.checkpoint(12), undisturbed.run.checkpoint(12)) == []


@pytest.mark.parametrize(
    ("setting", "num_gpus"),
    [("actor_rollout_ref.rollout.free_cache_engine=false", 1), ("actor_rollout_ref.hybrid_engine=false", 2)],
    ids=["awake", "apart"],
)
def test_where_engines_keep_their_memory_changes_no_byte(tmp_path: Path, setting: str, num_gpus: int):
    """Against engines that sleep beside one rank while it trains."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"fewer than {num_gpus} CUDA devices")
    settings = [*OVERRIDES, "trainer.n_gpus_per_node=1"]
    asleep = Driver(tmp_path / "asleep", settings, command="train")
    other = Driver(tmp_path / "other", [*settings, setting], command="train")
    assert asleep.run_to_end(600) == 0, asleep.tail()
    assert other.run_to_end(600) == 0, other.tail()
    assert differences(other.run.checkpoint(12), asleep.run.checkpoint(12)) == []
