"""Options through the real entry point: killed in the middle, each ends as its undisturbed run. `make options`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keepstep.controller.groups import SLICE_S
from keepstep.export.hugging_face import export
from tests.integration.compare import differences
from tests.integration.driver import Driver

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS, SAVED, STRUCK = 16, 8, 10
BASE = [
    f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVED}", f"trainer.test_freq={SAVED}",
    "s3.embedded=false",
    "retry.delays_s=[0.2]", "recovery.in_place=false", f"resume.prefer_multiple={SAVED}",
]  # fmt: skip
A, MODEL, ACTOR, ROLLOUT = "algorithm", *(f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
CASES = {
    "refreshed": ["actor_rollout_ref.ref.refresh_freq=4"],
    "lora": [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=16", f"{ACTOR}.optim.lr=0.005"],
    "dynamic": [
        f"{A}.filter_groups.enable=true", f"{ACTOR}.ppo_epochs=2", f"{ROLLOUT}.num_engines=2",
        f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio=0.02",
    ],
    "tensor_parallel": [f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "packed": [
        f"{MODEL}.use_remove_padding=true", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        f"{A}.use_kl_in_reward=true", f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.entropy_coeff=0.001",
        "reward_model.num_workers=1", f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.temperature=1.0",
    ],
    "half": [
        f"{ACTOR}.fsdp_config.model_dtype=bf16", f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.logprob_tolerance=2.0",
    ],
    "compiled": [f"{ACTOR}.use_torch_compile=true", f"{ACTOR}.use_prefix_grouper=true"],
}  # fmt: skip

WIDE = [
    # A rollout of seconds, so that engines tell of what is finished in the middle of it.
    "data.train_batch_size=1024", f"{ACTOR}.ppo_mini_batch_size=512", f"{ROLLOUT}.num_engines=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=128", "trainer.total_training_steps=4",
    "trainer.save_freq=2", "trainer.test_freq=-1", "resume.prefer_multiple=2", "retry.delays_s=[0.2]",
    "s3.embedded=false",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_killed_it_ends_as_the_undisturbed_run(workspace: Path, name: str):
    """C122: tensors, counters, rewards and kept rollouts, to the byte; the end can be exported."""
    whole = Driver(workspace / f"{name}_whole", [*BASE, *CASES[name]])
    assert whole.run_to_end() == 0, whole.tail()
    hit = Driver(workspace / f"{name}_hit", [*BASE, *CASES[name]])
    hit.start()
    hit.wait_for_verified(SAVED)
    hit.wait_for_step(STRUCK)
    hit.kill("rank", 1)
    assert hit.wait(240) == 0, hit.tail()
    assert [event["step"] for event in hit.events() if event["event"] == "resumed"] == [SAVED]
    final, expected = hit.run.checkpoint(STEPS), whole.run.checkpoint(STEPS)
    assert differences(final, expected) == []
    assert hit.rewards() == whole.rewards()
    kept = sorted(path.name for path in whole.run.rollouts.iterdir())
    assert kept == ["step_0.parquet", "step_16.parquet", "step_8.parquet"]
    assert all((hit.run.rollouts / file).read_bytes() == (whole.run.rollouts / file).read_bytes() for file in kept)
    report = export(final, workspace / f"{name}_export")
    assert report["loaded"] and report["num_tensors"] == 24


@pytest.mark.parametrize("role", ["rank", "engine"])
def test_engines_with_gpus_of_their_own_train_what_colocated_ones_do(workspace: Path, role: str):
    """To the byte, also when a process is killed in a rollout that ranks work out log-probs beside."""
    colocated = Driver(workspace / "colocated", WIDE)
    assert colocated.run_to_end() == 0, colocated.tail()
    apart = Driver(workspace / f"apart_{role}", [*WIDE, "actor_rollout_ref.hybrid_engine=false"])
    apart.start()
    apart.wait_for_step(3)
    # The first responses are told of after a slice; nothing says so outside.
    time.sleep(1.3 * SLICE_S)
    apart.kill(role, 1)
    assert apart.wait(240) == 0, apart.tail()
    (lost,) = [event for event in apart.events() if event["event"] == "worker_lost"]
    assert lost["reason"].startswith("rollout: "), lost
    assert differences(apart.run.checkpoint(4), colocated.run.checkpoint(4)) == []
    assert apart.rewards() == colocated.rewards()
