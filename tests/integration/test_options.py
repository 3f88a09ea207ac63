"""Every option of the algorithm, by the trainer without Ray: it does something, and a resume is exact with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.verify import verify
from tests.integration.driver import REPOSITORY
from tests.integration.local_trainer import ALL, CASES, ENGINEERING, SAVED_AT

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NUM_STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    from keepstep.quickstart.char_qwen3 import build_model, build_tokenizer

    model = folder / "model"
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    built = build_model(tokenizer)
    built.save_pretrained(model)
    tokenizer.save_pretrained(model)
    torch.save({name: value.detach() for name, value in built.named_parameters()}, folder / "base.pt")
    out = folder / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.local_trainer", str(model), str(folder), str(out)],
        cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", ALL)
def test_a_resume_is_exact(results: dict[str, Any], folder: Path, name: str):
    """C122: weights, moments, streams and every counter, with each option."""
    found = results[name]
    assert found["whole"] == found["resumed"]
    assert found["whole_state"] == found["resumed_state"]
    # What LoRA freezes has no moments to lack.
    assert found["num_without_moments"] == 0
    verdict = verify(folder / name.replace(" ", "_") / "checkpoints" / f"step_{SAVED_AT}", expected_run_id="run-a")
    assert verdict.resumable, verdict.reasons


def test_every_option_trains_another_policy(results: dict[str, Any]):
    """But for k1 with the gradient of k2, which is that of `mse` by its name."""
    digests = {name: results[name]["whole"] for name in CASES}
    assert digests.pop("k1 with the gradient of k2") == digests["mse"]
    assert len(set(digests.values())) == len(digests)


def test_dynamic_sampling_counts_what_it_rolled_out(results: dict[str, Any]):
    """Groups that agree are replaced by those of the next prompts; each response has a seed of its own."""
    plain, sampled = results["grpo"]["whole_state"], results["dynamic sampling"]["whole_state"]
    assert plain["num_gen_batches"] == NUM_STEPS < sampled["num_gen_batches"]
    for state in (plain, sampled):
        assert state["dataloader_state"]["train_dataset_offset"] == 8 * state["num_gen_batches"]
    assert sampled["num_updates"] == plain["num_updates"]
    assert results["dynamic sampling"]["metrics"]["critic/rewards/zero_std_groups"] == 0
    assert results["grpo"]["metrics"]["critic/rewards/zero_std_groups"] > 0
    seeds = results["dynamic sampling"]["seeds"]
    assert len(seeds) == len(set(seeds)) == 32 * sampled["num_gen_batches"]


@pytest.mark.parametrize("name", ENGINEERING)
def test_how_it_is_worked_out_does_not_matter(results: dict[str, Any], folder: Path, name: str):
    """Micro-batches of one or of all, by tokens, packed, prompts once, activations again: the same training."""
    assert_same_training(results, folder, name, "grpo")


def test_host_memory_gives_the_same_bytes(results: dict[str, Any]):
    """On a CPU, where FSDP2's off-loading policy moves everything to where it is already."""
    assert results["in host memory"]["whole"] == results["grpo"]["whole"]


def test_colocated_engines_and_those_with_gpus_of_their_own_train_the_same_policy(results: dict[str, Any]):
    """To the byte: the ranks begin on log-probs as responses come in, shorter ones first, in the same micro-batches."""
    apart, colocated = results["engines of their own"], results["log-probs by sixes"]
    assert apart["whole"] == colocated["whole"] == apart["resumed"]
    assert apart["whole_state"] == colocated["whole_state"]
    assert (apart["num_told"], colocated["num_told"]) == (32 * NUM_STEPS, 0)


@pytest.mark.parametrize("name", ["one update after old log-probs", "one update on prompts once"])
def test_with_one_update_its_own_forward_pass_gives_the_old_log_probs(results: dict[str, Any], folder: Path, name: str):
    assert_same_training(results, folder, name, "one update")
    assert results["one update"]["metrics"]["actor/ppo_kl"] == 0.0
    assert results["one update"]["whole"] != results["grpo"]["whole"]


def assert_same_training(results: dict[str, Any], folder: Path, name: str, other: str) -> None:
    base, plain, found = (
        torch.cat([value.flatten() for _, value in sorted(torch.load(path).items())])
        for path in (folder / "base.pt", *(folder / n.replace(" ", "_") / "weights.pt" for n in (other, name)))
    )
    assert (found - plain).norm() < 1e-3 * (plain - base).norm()
    assert results[name]["seeds"] == results[other]["seeds"]
    for metric, value in results[other]["metrics"].items():
        assert results[name]["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("name", ["grpo", "one update"])
def test_an_engine_of_other_weights_stops_the_step(results: dict[str, Any], name: str):
    """Before the update or right after it; either way the step does not count."""
    message, step = results["stale"][name]
    assert "engine and trainer differ by 0.1" in message and step == "0"


def test_each_reference_is_the_policy_of_its_step(folder: Path):
    """`refresh_freq=2`, saved after the second step: the checkpoint's reference is its own policy, and not the base."""
    step = folder / "refreshed_reference" / "checkpoints" / f"step_{SAVED_AT}"
    policy, reference = (torch.load(step / name, weights_only=True) for name in (layout.ACTOR, layout.REF))
    assert policy.keys() == reference.keys()
    assert all(torch.equal(policy[name], reference[name]) for name in policy)
    before = torch.load(folder / "grpo" / "checkpoints" / f"step_{SAVED_AT}" / layout.REF, weights_only=True)
    assert not torch.equal(before["model.norm.weight"], reference["model.norm.weight"])
