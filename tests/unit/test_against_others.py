"""The same numbers and gradients as verl's and TRL's own functions, in float64 unless said otherwise.

Both stand in an environment of their own, `make against-others`; elsewhere this module is skipped. Where one of them
means something else by a name, the test says what.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.algorithm import advantages, logits, losses, mismatch, shaping

MISSING = "in an environment of its own: make against-others"
pytest.importorskip("verl", reason=MISSING)
pytest.importorskip("trl", reason=MISSING)

import numpy as np  # noqa: E402
import verl.utils.torch_functional as verl_functional  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.rewards import get_soft_overlong_punishment  # noqa: E402
from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty  # noqa: E402
from verl.utils.debug.metrics import calculate_debug_metrics  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.reward_manager.dapo import DAPORewardManager  # noqa: E402

NUM_ROWS, WIDTH, LONGEST = 6, 7, 11
LENGTHS = [7, 1, 4, 0, 3, 5]
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(*shape: int, low: float, high: float, seed: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=generator(seed)) * (high - low) + low


@pytest.fixture
def batch() -> SimpleNamespace:
    """Log-probs of the new, old and reference policy and of the engine; a row of one token, and one of none."""
    old = uniform(NUM_ROWS, WIDTH, low=-3, high=-0.1, seed=1)
    return SimpleNamespace(
        mask=(torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)).double(),
        old=old,
        new=old + uniform(NUM_ROWS, WIDTH, low=-1.2, high=1.2, seed=2),
        ref=old + uniform(NUM_ROWS, WIDTH, low=-1, high=1, seed=3),
        engine=old + uniform(NUM_ROWS, WIDTH, low=-0.5, high=0.5, seed=4),
        advantages=torch.tensor([-1.3, 0.7, 2.0, -1.1, -2.5, 0.4], dtype=torch.float64),
    )


def value_and_gradient(function: Any, at: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = at.clone().requires_grad_()
    value = function(leaf)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad * mask


def tolerance(how: str) -> float:
    """verl's mean over a response divides by its length + 1e-8."""
    return 1e-7 if how == "seq-mean-token-mean" else 1e-12


def agree(mine: Any, theirs: Any, at: torch.Tensor, mask: torch.Tensor, rtol: float) -> None:
    for found, expected in zip(value_and_gradient(mine, at, mask), value_and_gradient(theirs, at, mask), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


def my_loss(batch: SimpleNamespace, how: str, level: str = "token", **options: Any) -> Any:
    weights, coefficient = options.pop("weights", None), options.pop("kl", 0.0)

    def loss(new: torch.Tensor) -> torch.Tensor:
        ratio = losses.token_log_ratio if level == "token" else losses.sequence_log_ratio
        found = losses.policy_loss(ratio(new, batch.old, batch.mask), batch.advantages.unsqueeze(1), **options).loss
        if weights is not None:
            found = found * weights
        found = found + coefficient * losses.kl_penalty(new, batch.ref, batch.mask, "k3")
        denominator = losses.loss_denominator(batch.mask, how, max_response_length=LONGEST)
        return losses.masked_sum(found, losses.token_weights(batch.mask, how)) / denominator

    return loss


# verl


def verl_config(**options: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, **options)


def of_the_whole(batch: SimpleNamespace, dp_size: int = 1) -> dict[str, Any]:
    """What verl's trainer hands to its losses: all rows of the mini-batch count, also one without a token."""
    return {
        "dp_size": dp_size,
        "batch_num_tokens": batch.mask.sum(),
        "global_batch_size": NUM_ROWS,
        "loss_scale_factor": LONGEST,
    }


@pytest.mark.parametrize("group_size", [2, 3, 8])
@pytest.mark.parametrize(
    ("theirs", "mine", "normalize", "rtol"),
    [
        ("grpo", "grpo", True, 1e-12),
        ("grpo", "dr_grpo", False, 1e-12),
        ("grpo_vectorized", "grpo", True, 1e-5),  # float32 whatever comes in
        ("rloo", "rloo", True, 1e-12),
        ("rloo_vectorized", "rloo", True, 1e-12),
        ("grpo_passk", "grpo_passk", True, 1e-12),
        ("grpo_passk", "grpo_passk", False, 1e-12),
    ],
)
def test_verl_advantages(theirs: str, mine: str, normalize: bool, rtol: float, group_size: int):
    rewards = uniform(5, group_size, low=-1, high=2, seed=group_size)
    rewards[3] = 0.5  # A power of two: verl's mean of equal rewards is exact as well.
    per_token = torch.zeros(rewards.numel(), 2, dtype=torch.float64)
    per_token[:, 1] = rewards.flatten()
    options: dict[str, Any] = {"norm_adv_by_std_in_grpo": normalize} if theirs.startswith("grpo") else {}
    if theirs == "grpo_passk":
        options = {"config": options}
    index = np.repeat([f"prompt {number}" for number in range(5)], group_size)
    found, _ = core_algos.get_adv_estimator_fn(theirs)(
        token_level_rewards=per_token, response_mask=torch.ones_like(per_token), index=index, **options
    )
    expected = advantages.estimate_advantages(rewards, mine, normalize_by_std=normalize)
    torch.testing.assert_close(found[:, 0].view_as(rewards).double(), expected, rtol=rtol, atol=rtol)


def test_verl_leaves_a_group_of_one_its_reward():
    """The one difference of the advantages: here it has none."""
    reward = torch.tensor([[5.0]], dtype=torch.float64)
    found, _ = core_algos.compute_grpo_outcome_advantage(reward, torch.ones(1, 1), np.array(["a"]))
    assert found.item() == pytest.approx(5.0, rel=1e-5)
    assert advantages.grpo_advantages(reward).item() == 0.0


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_verl_policy_loss(batch: SimpleNamespace, how: str, weighted: bool):
    """`vanilla`: clips apart, dual clip, engine weights, all aggregations, and the fractions that are logged."""
    config = verl_config(
        clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.7, global_batch_info=of_the_whole(batch)
    )
    weights = mismatch.truncated_weights(batch.old, batch.engine, batch.mask, level="token", cap=1.2)
    spread = batch.advantages.unsqueeze(1).expand(-1, WIDTH)
    logged: dict[str, float] = {}

    def theirs(new: torch.Tensor) -> torch.Tensor:
        loss, metrics = core_algos.get_policy_loss_fn("vanilla")(
            old_log_prob=batch.old, log_prob=new, advantages=spread, response_mask=batch.mask, loss_agg_mode=how,
            config=config, rollout_is_weights=weights if weighted else None,
        )  # fmt: skip
        logged.update(metrics)
        return loss

    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.7}
    mine = my_loss(batch, how, weights=weights if weighted else None, **options)
    agree(mine, theirs, batch.new, batch.mask, tolerance(how))
    log_ratio = losses.token_log_ratio(batch.new, batch.old, batch.mask)
    found = losses.policy_loss(log_ratio, batch.advantages.unsqueeze(1), **options)
    num_tokens = batch.mask.sum()
    assert 0 < logged["actor/pg_clipfrac_lower"] < logged["actor/pg_clipfrac"] < 1
    for name, values in (
        ("pg_clipfrac", found.clipped), ("pg_clipfrac_lower", found.clipped_lower), ("ppo_kl", -log_ratio)
    ):  # fmt: skip
        mean = (losses.masked_sum(values, batch.mask) / num_tokens).item()
        assert mean == pytest.approx(logged[f"actor/{name}"], rel=1e-6), name


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_verl_gspo(batch: SimpleNamespace, how: str):
    """`gspo`: the ratio of whole responses in its token-wise form, value and gradient."""
    config = verl_config(clip_ratio_low=0.1, clip_ratio_high=0.15, global_batch_info=of_the_whole(batch))
    spread = batch.advantages.unsqueeze(1).expand(-1, WIDTH)

    def theirs(new: torch.Tensor) -> torch.Tensor:
        return core_algos.get_policy_loss_fn("gspo")(
            old_log_prob=batch.old, log_prob=new, advantages=spread, response_mask=batch.mask, loss_agg_mode=how,
            config=config,
        )[0]  # fmt: skip

    agree(my_loss(batch, how, "sequence", clip_low=0.1, clip_high=0.15), theirs, batch.new, batch.mask, tolerance(how))


def test_verl_clamps_far_off_ratios_alike(batch: SimpleNamespace):
    """Log-ratios beyond +-20 (tokens) and 10 (responses) come out as the same finite losses."""
    new = batch.old + 40 * torch.sign(batch.new - batch.old)
    spread = batch.advantages.unsqueeze(1).expand(-1, WIDTH)
    for name, level in (("vanilla", "token"), ("gspo", "sequence")):
        config = verl_config(clip_ratio_c=1e9, global_batch_info=of_the_whole(batch))
        found, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=batch.old, log_prob=new, advantages=spread, response_mask=batch.mask,
            loss_agg_mode="token-mean", config=config,
        )  # fmt: skip
        mine = my_loss(batch, "token-mean", level, clip_low=0.2, clip_high=0.2)(new)
        torch.testing.assert_close(mine, found, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_verl_aggregation_over_ranks_and_micro_batches(batch: SimpleNamespace, how: str):
    """Two ranks with two micro-batches each, averaged over the ranks as FSDP does, is our sum over one denominator."""
    total = 0.0
    for rank in ([[0, 1], [2]], [[3], [4, 5]]):
        for rows in rank:
            part = core_algos.agg_loss(
                batch.new[rows], batch.mask[rows], how, **of_the_whole(batch, dp_size=2)
            )  # fmt: skip
            total += part.item() / 2
    denominator = losses.loss_denominator(batch.mask, how, max_response_length=LONGEST)
    mine = losses.masked_sum(batch.new, losses.token_weights(batch.mask, how)) / denominator
    assert mine.item() == pytest.approx(total, rel=tolerance(how))


@pytest.mark.parametrize(
    "estimator", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]
)
def test_verl_kl(batch: SimpleNamespace, estimator: str):
    """Every name; log-ratios within 1 and of 40."""
    for factor in (1.0, 40.0):
        ref = batch.new + factor * (batch.ref - batch.new)
        agree(
            lambda new, ref=ref: (losses.kl_penalty(new, ref, batch.mask, estimator) * batch.advantages[:, None]).sum(),
            lambda new, ref=ref: (
                core_algos.kl_penalty(new, ref, estimator) * batch.mask * batch.advantages[:, None]
            ).sum(),
            batch.new,
            batch.mask,
            1e-12,
        )


def test_verl_kl_in_reward(batch: SimpleNamespace):
    """`algorithm.use_kl_in_reward`: what GRPO sums up is our reward less the response's KL."""
    scores = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    scores[:, 2] = batch.advantages
    data = DataProto.from_dict(
        {
            "response_mask": batch.mask,
            "token_level_scores": scores,
            "old_log_probs": batch.old,
            "ref_log_prob": batch.ref,
        }
    )
    found, _ = apply_kl_penalty(data, core_algos.FixedKLController(0.3), "low_var_kl")
    kl = losses.kl_penalty(batch.old, batch.ref, batch.mask, "low_var_kl")
    mine = shaping.kl_in_reward(batch.advantages, kl, batch.mask, 0.3)
    torch.testing.assert_close(mine, found.batch["token_level_rewards"].sum(-1), rtol=1e-12, atol=1e-12)


def test_verl_overlong_penalty():
    """`reward_manager=dapo`: limit 20, buffer 8, factor 0.5; a score of 0 leaves the penalty alone."""
    lengths = [1, 12, 13, 16, 20]
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "", eos_token="<eos>")
    manager = DAPORewardManager(
        tokenizer, 0, lambda **_: 0.0, max_resp_len=20,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=8, penalty_factor=0.5, log=False),
    )  # fmt: skip
    responses = torch.ones(5, 20, dtype=torch.int64)
    attention = torch.cat([torch.ones(5, 1), torch.arange(20) < torch.tensor(lengths).unsqueeze(1)], dim=1)
    info = np.array([{"ground_truth": ""}] * 5, dtype=object)
    data = DataProto.from_dict(
        {"prompts": responses[:, :1], "responses": responses, "attention_mask": attention.long()},
        non_tensors={"reward_model": info, "data_source": np.array(["x"] * 5, dtype=object)},
    )
    mine = shaping.overlong_penalty(torch.tensor(lengths), max_length=20, buffer_length=8, factor=0.5)
    torch.testing.assert_close(mine, manager(data).sum(-1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [1.1, 2.0])
def test_verl_truncated_weights(batch: SimpleNamespace, level: str, cap: float):
    for factor in (1.0, 100.0):
        engine = batch.old + factor * (batch.engine - batch.old)
        found, _ = rollout_corr_helper.compute_rollout_correction_weights(batch.old - engine, batch.mask, level, cap)
        mine = mismatch.truncated_weights(batch.old, engine, batch.mask, level=level, cap=cap)
        torch.testing.assert_close(mine, found, rtol=1e-12, atol=0.0)


def test_verl_mismatch_metrics(batch: SimpleNamespace):
    """Without the row that has no token: verl counts it as a response of perplexity 1."""
    rows = [0, 1, 2, 4, 5]
    old, engine, mask = batch.old[rows], batch.engine[rows], batch.mask[rows]
    mine = mismatch.mismatch_metrics(batch.old, batch.engine, batch.mask)
    found = rollout_corr_helper.compute_offpolicy_metrics(old, engine, mask)
    data = DataProto.from_dict(
        {"rollout_log_probs": engine, "old_log_probs": old, "response_mask": mask, "responses": torch.ones(5, WIDTH)}
    )
    gaps = calculate_debug_metrics(data)
    for name, value in mine.items():
        theirs = gaps[name] if name in gaps else found[name.removeprefix("rollout_corr/")]
        assert value == pytest.approx(theirs, rel=1e-6), name


def test_verl_and_trl_log_probs_and_entropy():
    """Float32 logits of 1,000 words at temperature 0.8."""
    values = torch.randn(3, 5, 1000, generator=generator(1)) * 3
    tokens = torch.randint(1000, (3, 5), generator=generator(2))
    log_probs, entropies = logits.token_log_probs_and_entropy(values, tokens, 0.8)
    for theirs in (
        verl_functional.logprobs_from_logits_v2(values / 0.8, tokens),
        selective_log_softmax(values, tokens, temperature=0.8),
    ):
        torch.testing.assert_close(log_probs, theirs, rtol=1e-5, atol=1e-5)
    for theirs in (verl_functional.entropy_from_logits(values / 0.8), entropy_from_logits(values / 0.8)):
        torch.testing.assert_close(entropies, theirs, rtol=1e-4, atol=1e-5)


# TRL


def test_trl_overlong_penalty():
    lengths = [0, 12, 13, 16, 20, 25]
    theirs = get_soft_overlong_punishment(20, 8)([[1] * length for length in lengths])
    mine = shaping.overlong_penalty(torch.tensor(lengths), max_length=20, buffer_length=8)
    torch.testing.assert_close(mine, torch.tensor(theirs))


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A real trainer of a tiny model, of which each test takes the part that it compares with."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from keepstep.quickstart import char_qwen3

    folder = tmp_path_factory.mktemp("model")
    char_qwen3.make(folder)
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, report_to="none", num_generations=3,
        per_device_train_batch_size=6, max_completion_length=LONGEST, gradient_accumulation_steps=1, beta=0.0,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 6),
    )


@pytest.mark.parametrize("scale", ["group", "none"])
def test_trl_advantages_and_truncation(trl_trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch, scale: str):
    """Its own scoring of given completions, in float32: epsilon 1e-4, the unbiased deviation; truncated ones masked."""
    rewards = [1.0, 0.0, 0.25, 2.0, 2.0, -1.0]
    end = trl_trainer.eos_token_ids[0]
    plain = next(number for number in range(3, 20) if number not in (end, trl_trainer._tokenizer.pad_token_id))
    responses = [[plain, end], [plain] * 4, [end], [plain] * 3 + [end], [plain, plain], [plain, end]]
    generated = ([[plain]] * 6, responses, None, ["x"] * 6, None, {}, None, None)
    monkeypatch.setattr(trl_trainer, "_generate", lambda prompts: generated)
    monkeypatch.setattr(trl_trainer, "reward_funcs", [lambda **_: rewards])
    monkeypatch.setattr(trl_trainer, "scale_rewards", scale)
    monkeypatch.setattr(trl_trainer, "mask_truncated_completions", True)
    trl_trainer.model.train()
    found = trl_trainer._generate_and_score_completions([{"prompt": "1+1="}] * 6)
    mine = advantages.grpo_advantages(
        torch.tensor(rewards).view(2, 3), normalize_by_std=scale == "group", epsilon=1e-4
    ).flatten()
    torch.testing.assert_close(mine, found["advantages"], rtol=1e-5, atol=1e-6)
    mask = (torch.arange(4) < torch.tensor([len(ids) for ids in responses]).unsqueeze(1)).long()
    truncated = torch.tensor([ids[-1] != end for ids in responses])
    assert torch.equal(shaping.mask_truncated(mask, truncated), found["completion_mask"])


def trl_loss(trainer: GRPOTrainer, batch: SimpleNamespace, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Its `_compute_loss`, given log-probs instead of a model's."""
    for name in ("delta", "use_bias_correction_kl"):
        patch.setattr(trainer.args, name, options.pop(name, None))
    for name, value in options.items():
        patch.setattr(trainer, name, value)
    patch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    patch.setattr(trainer.args, "steps_per_generation", 1)
    trainer.model.train()
    ids, zeros = torch.ones(NUM_ROWS, WIDTH, dtype=torch.int64), torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": batch.mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(), "importance_sampling_ratio": options.get("ratio"),
    }  # fmt: skip

    def loss(new: torch.Tensor) -> torch.Tensor:
        patch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (new, zeros, None))
        return trainer._compute_loss(trainer.model, inputs)

    return loss


TRL_LOSS_TYPES = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_trl_token_level_loss(
    trl_trainer: GRPOTrainer, batch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, loss_type: str
):
    """Clips apart, dual clip (`delta`), k3 in the loss (`beta`)."""
    theirs = trl_loss(
        trl_trainer, batch, monkeypatch, loss_type=loss_type, importance_sampling_level="token", beta=0.1,
        epsilon_low=0.2, epsilon_high=0.28, delta=1.7,
    )  # fmt: skip
    mine = my_loss(batch, TRL_LOSS_TYPES[loss_type], kl=0.1, clip_low=0.2, clip_high=0.28, dual_clip=1.7)
    agree(mine, theirs, batch.new, batch.mask, 1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_trl_sequence_level_loss(
    trl_trainer: GRPOTrainer, batch: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, loss_type: str
):
    """One ratio per response there, the token-wise form here; TRL's `luspo` sums over a response's tokens."""
    theirs = trl_loss(
        trl_trainer, batch, monkeypatch, loss_type=loss_type, importance_sampling_level="sequence", beta=0.0,
        epsilon_low=0.1, epsilon_high=0.15,
    )  # fmt: skip
    how = {"grpo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum"}[loss_type]
    agree(my_loss(batch, how, "sequence", clip_low=0.1, clip_high=0.15), theirs, batch.new, batch.mask, 1e-12)
