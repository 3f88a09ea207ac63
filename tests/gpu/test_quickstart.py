"""The quickstart on one CUDA device: rank and engine share it. Run with `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.compare import differences
from tests.integration.driver import Driver

pytestmark = pytest.mark.gpu

OVERRIDES = [
    "trainer.device=cuda", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=12", "trainer.save_freq=5",
    "trainer.test_freq=-1", "s3.embedded=false", "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "actor_rollout_ref.rollout.logprob_tolerance=0.05",
]  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_killed_run_on_a_gpu_ends_with_the_same_bytes(tmp_path: Path):
    undisturbed, hit = (Driver(tmp_path / name, OVERRIDES, command="train") for name in ("undisturbed", "hit"))
    assert undisturbed.run_to_end(600) == 0, undisturbed.tail()
    hit.start()
    hit.wait_for_step(8, timeout_s=300)
    hit.kill_command()
    assert hit.run_to_end(600) == 0, hit.tail()
    assert differences(hit.run.checkpoint(12), undisturbed.run.checkpoint(12)) == []
