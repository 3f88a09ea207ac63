"""The trainer without Ray: one rank and an engine that samples from it, all in this process.

    python -m tests.integration.local_trainer MODEL FOLDER OUT.json

For every case: four steps at once, and two steps, a checkpoint, everything anew from it, two more.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from keepstep.actor.rank import Rank
from keepstep.actor.shards import trained
from keepstep.actor.spec import RankSpec
from keepstep.checkpoint import layout
from keepstep.checkpoint.writer import assemble, save
from keepstep.checkpoint.written import SaveRequest
from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.controller.leaving import Leaving
from keepstep.controller.state import TrainState
from keepstep.controller.trainer import Trainer
from keepstep.data.loader import Dataset, Row
from keepstep.errors import StaleWeightsError
from keepstep.rewards.scoring import Scorer
from keepstep.rollout.types import Request, Response
from keepstep.run import read_json

NUM_ROWS, NUM_STEPS, SAVED_AT = 24, 4, 2
BASE = [
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6", "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
    "trainer.total_training_steps=4", "trainer.test_freq=-1", "actor_rollout_ref.actor.kl_loss_coef=0.05",
]  # fmt: skip
A, ACTOR, MODEL = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.model"
LORA = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{ACTOR}.optim.lr=0.01"]
CASES: dict[str, list[str]] = {
    "grpo": [],
    "without std": [f"{A}.norm_adv_by_std_in_grpo=false"],
    "dr_grpo": [f"{A}.adv_estimator=dr_grpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    "rloo": [f"{A}.adv_estimator=rloo"],
    "grpo_passk": [f"{A}.adv_estimator=grpo_passk"],
    "no reference": [f"{ACTOR}.use_kl_loss=false"],
    "kl in reward": [f"{ACTOR}.use_kl_loss=false", f"{A}.use_kl_in_reward=true", f"{A}.kl_ctrl.kl_coef=0.1"],
    "k1 with the gradient of k2": [f"{ACTOR}.kl_loss_type=k1+"],
    "mse": [f"{ACTOR}.kl_loss_type=mse"],
    "seq-mean-token-sum": [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
    "seq-mean-token-mean": [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
    "clip apart": [f"{ACTOR}.clip_ratio_low=5e-4", f"{ACTOR}.clip_ratio_high=1e-3", f"{ACTOR}.clip_ratio_c=1.1"],
    "gspo": [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio=0.01"],
    "entropy": [f"{ACTOR}.entropy_coeff=0.01"],
    "token weights": [f"{A}.rollout_correction.rollout_is=token"],
    "sequence weights": [f"{A}.rollout_correction.rollout_is=sequence"],
    "several updates": [f"{ACTOR}.ppo_epochs=3"],
    "refreshed reference": ["actor_rollout_ref.ref.refresh_freq=2"],
    "lora": LORA,
    "lora on some modules": [*LORA, f"{MODEL}.target_modules=[q_proj,v_proj]", f"{ACTOR}.use_kl_loss=false"],
    "dynamic sampling": [f"{A}.filter_groups.enable=true"],
    "overlong": ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=2",
                 f"{A}.mask_truncated=true"],
}  # fmt: skip
ENGINEERING: dict[str, list[str]] = {
    "one by one": [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"],
    "all at once": [f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"],
    "token budget": [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24"],
    "packed": [f"{MODEL}.use_remove_padding=true"],
    "packed in a token budget": [
        f"{MODEL}.use_remove_padding=true", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40",
    ],
    "prompts once": [f"{ACTOR}.use_prefix_grouper=true"],
    "prompts once in a token budget": [
        f"{ACTOR}.use_prefix_grouper=true", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24",
    ],
    "log-probs by sixes": ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=6"],
    "engines of their own": [
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=6", "actor_rollout_ref.hybrid_engine=false",
    ],
    "activations again": [f"{MODEL}.enable_gradient_checkpointing=true"],
    "in host memory": [
        f"{ACTOR}.fsdp_config.param_offload=true", "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    ],
}  # fmt: skip
"""How the same thing is worked out."""
AT_ONCE = f"{ACTOR}.ppo_mini_batch_size=8"
ONE_UPDATE: dict[str, list[str]] = {
    "one update": [AT_ONCE],
    # A penalty of nothing, which all the same asks for the old log-probs before the update.
    "one update after old log-probs": [AT_ONCE, f"{A}.use_kl_in_reward=true", f"{A}.kl_ctrl.kl_coef=0"],
    "one update on prompts once": [AT_ONCE, f"{ACTOR}.use_prefix_grouper=true"],
    "one update without a reference": [
        AT_ONCE,
        f"{ACTOR}.use_kl_loss=false",
        f"{A}.rollout_correction.rollout_is=token",
    ],
}
"""With it the old log-probs are those of its own forward pass."""
ALL = CASES | ENGINEERING | ONE_UPDATE


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Some groups agree, so that dynamic sampling has something to drop."""
    return float(int(solution_str.split()[0]) % 3 == 0)


@dataclass
class LocalRanks:
    """A `RankGroup` of one rank in this process."""

    rank: Rank

    def log_probs(self, shards: Sequence[Any]) -> list[Any]:
        return [self.rank.log_probs(shards[0])]

    def begin_log_probs(self, shards: Sequence[Any]) -> list[Any]:
        return self.log_probs(shards)

    def have_log_probs(self, _begun: list[Any]) -> bool:
        return True

    def end_log_probs(self, begun: list[Any]) -> list[Any]:
        return begun

    def update(self, shards: Sequence[Any], log_probs: Sequence[Any], mini_batches: Sequence[Any]) -> Any:
        metrics, old = self.rank.update(shards[0], log_probs[0], mini_batches[0])
        return metrics, [old]

    def refresh_reference(self) -> None:
        self.rank.refresh_reference()

    def full_weights(self, dtype: str) -> Any:
        return self.rank.full_weights(dtype)


@dataclass
class LocalEngines:
    """Samples from the rank's own policy; each response from its own seed."""

    rank: Rank
    eos_id: int
    seeds: list[int] = field(default_factory=list)
    num_told: int = 0
    """Responses that were told of before all were there."""

    def update_weights(self, _weights: Any, _version: int) -> None: ...

    def sleep(self) -> None: ...

    @torch.no_grad()
    def generate(
        self,
        requests: list[Request],
        *,
        max_tokens: int,
        finished: Callable[[dict[int, Response]], None] | None,
        **_rest: Any,
    ) -> list[Response]:
        self.seeds += [request.seed for request in requests]
        self.rank.model.eval()
        found = [self._sample(request, max_tokens) for request in requests]
        self.rank.model.reshard()  # type: ignore[operator]
        self.rank.model.train()
        if finished is not None:
            # The shorter ones are there first.
            for place in sorted(range(len(found)), key=lambda place: len(found[place].token_ids)):
                finished({place: found[place]})
                self.num_told += 1
        return found

    def _sample(self, request: Request, max_tokens: int) -> Response:
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        ids, log_probs = list(request.prompt_ids), []
        for _ in range(max_tokens):
            row = self.rank.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            ids.append(token)
            log_probs.append(float(row[token]))
            if token == self.eos_id:
                break
        sampled = ids[len(request.prompt_ids) :]
        return Response(sampled, log_probs, sampled[-1] == self.eos_id)


def build(config: RunConfig, model: str) -> Rank:
    """A rank of one, without weights."""
    rank = Rank(
        RankSpec(
            0, 1, "cpu", model, model, config.actor_rollout_ref.model, config.actor_rollout_ref.actor,
            config.actor_rollout_ref.ref, 1.0, NUM_STEPS, config.trainer.seed, 60.0,
            config.algorithm.rollout_correction, config.data.max_response_length, config.needs_reference,
            config.needs_old_log_probs, False,
        )
    )  # fmt: skip
    rank.connect("127.0.0.1", rank.listen("127.0.0.1"))
    return rank


def trainer_of(config: RunConfig, rank: Rank, state: TrainState) -> Trainer:
    rows = [Row(i, [3 + i % 10, 3 + i // 10, 4, 5], "", "numbers", "", {}) for i in range(NUM_ROWS)]
    parts = SimpleNamespace(
        ranks=LocalRanks(rank), engines=LocalEngines(rank, eos_id=1), saver=None, val_set=None, pad_id=0,
        scorer=Scorer(reward, config.reward_model, config.custom_reward_function), keep=lambda step, samples: None,
        train_set=Dataset(rows, NUM_ROWS, ""), decode=lambda ids: " ".join(map(str, ids)), probe_prompts=[],
        report=lambda step, metrics: None,
        report_validation=lambda step, metrics: None, leaving=Leaving(3600.0, lambda failure: None),
    )  # fmt: skip
    return Trainer(config, parts, state, NUM_STEPS)  # type: ignore[arg-type]


def digest(rank: Rank) -> str:
    """Of all tensors that make up the training state."""
    snapshot = rank.snapshot(False)
    values = assemble([snapshot.params])
    found = hashlib.sha256(json.dumps(snapshot.rng, sort_keys=True, default=str).encode())
    for name in sorted(values):
        found.update(values[name].contiguous().view(torch.uint8).numpy().tobytes())
    for parameter in trained(rank.model).values():
        for moment in (rank.optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")):
            found.update(moment.to_local().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def both_ways(name: str, model: str, folder: Path) -> dict[str, Any]:
    """What a whole run and an interrupted one come to."""
    options = ALL[name]
    config = load("quickstart", [*BASE, f"trainer.output_dir={folder}", "data.max_prompt_length=4", *options])
    rank = build(config, model)
    rank.load_initial(model)
    whole = trainer_of(config, rank, TrainState())
    for _ in range(SAVED_AT):
        whole.step()
    request = SaveRequest(
        str(folder), "run-a", 1, SAVED_AT, 1, config.has_reference, None, whole.state.to_record(NUM_ROWS), "a: 1",
        model, {}, layout.FULL,
    )  # fmt: skip
    save(request, [rank.snapshot(False)], [rank.snapshot_reference()] if config.has_reference else None)
    while whole.state.global_step < NUM_STEPS:
        whole.step()
    found = {"whole": digest(rank), "whole_state": whole.state.to_record(NUM_ROWS), "metrics": whole.state.metrics}
    found["seeds"] = whole.parts.engines.seeds
    found["num_told"] = whole.parts.engines.num_told
    torch.save(assemble([rank.snapshot(False).params]), folder / "weights.pt")
    dist.destroy_process_group()

    rank = build(config, model)
    step = folder / "checkpoints" / f"step_{SAVED_AT}"
    loaded = rank.load_checkpoint(str(step))
    resumed = trainer_of(config, rank, TrainState.from_record(read_json(step / layout.TRAINER_STATE)))
    while resumed.state.global_step < NUM_STEPS:
        resumed.step()
    found |= {"resumed": digest(rank), "resumed_state": resumed.state.to_record(NUM_ROWS)}
    found["num_without_moments"] = loaded.num_without_moments
    dist.destroy_process_group()
    return found


def stale(name: str, model: str, folder: Path) -> list[str]:
    """What is said of an engine that samples from other weights, and the step that counts after it."""
    config = load("quickstart", [*BASE, f"trainer.output_dir={folder}", "data.max_prompt_length=4", *ALL[name]])
    rank = build(config, model)
    rank.load_initial(model)
    trainer = trainer_of(config, rank, TrainState())
    generate = trainer.parts.engines.generate

    def other(*args: Any, **kwargs: Any) -> list[Response]:
        return [
            replace(found, log_probs=[value - 0.1 for value in found.log_probs]) for found in generate(*args, **kwargs)
        ]

    trainer.parts.engines.generate = other  # type: ignore[method-assign]
    try:
        trainer.step()
    except StaleWeightsError as error:
        return [error.message, str(trainer.state.global_step)]
    finally:
        dist.destroy_process_group()
    return ["nothing"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    results = {name: both_ways(name, model, folder / name.replace(" ", "_")) for name in ALL}
    results["stale"] = {
        name: stale(name, model, folder / f"stale_{name}".replace(" ", "_")) for name in ("grpo", "one update")
    }
    out.write_text(json.dumps(results))
