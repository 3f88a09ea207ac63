"""TRL's GRPOTrainer on the work of a Keepstep configuration, in TRL's own environment; `benchmarks.train` calls it.

    python benchmarks/train_trl.py JOB.json OUT.json

JOB: {"model", "rows": [{"prompt", "ground_truth"}], "reward_file", "num_threads", "num_steps", "seed", and sizes}.
OUT: per step of Keepstep's (one rollout batch with all its updates) the seconds of its phases and the mean reward.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def timed(
    trainer: Any, name: str, phase: str, seconds: dict[str, float], when: Callable[[], bool] = lambda: True
) -> None:
    """Count what calls of this method take as `phase`."""
    inner = getattr(trainer, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        try:
            return inner(*args, **kwargs)
        finally:
            if when():
                seconds[phase] += time.monotonic() - begin

    setattr(trainer, name, outer)


def load_reward(path: str) -> Callable[..., list[float]]:
    spec = importlib.util.spec_from_file_location("reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(completions: list[Any], ground_truth: list[str], **_rest: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [module.compute_score("", text, truth) for text, truth in zip(texts, ground_truth, strict=True)]

    return reward


def settings(job: dict[str, Any], folder: str) -> GRPOConfig:
    """The same algorithm: mini-batches of one update each, means over tokens, clip and KL alike."""
    num_updates = job["train_batch_size"] // job["mini_batch_size"]
    num_rows = job["mini_batch_size"] * job["group_size"]
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=num_rows // job["micro_batch_size"],
        steps_per_generation=num_updates * num_rows // job["micro_batch_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_response_length"],
        max_steps=job["num_steps"] * num_updates,
        learning_rate=job["lr"],
        warmup_steps=job["lr_warmup_steps"] * num_updates,
        lr_scheduler_type="constant_with_warmup",
        weight_decay=job["weight_decay"],
        max_grad_norm=1.0,
        beta=job["kl_coef"],
        epsilon=0.2,
        loss_type="bnpo",
        scale_rewards="group",
        temperature=1.0,
        top_k=0,
        seed=job["seed"],
        data_seed=job["seed"],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Steps(TrainerCallback):
    """Seconds and rewards per step of Keepstep's."""

    def __init__(self, num_updates: int, seconds: dict[str, float]) -> None:
        self.rows: list[dict[str, float]] = []
        self._num_updates, self._seconds = num_updates, seconds
        self._begin = 0.0
        self.told: list[dict[str, float]] = []

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        if state.global_step % self._num_updates == 0:
            self._seconds.clear()
            self._begin = time.monotonic()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_rest: Any) -> None:
        if state.global_step % self._num_updates == 0:
            self.rows.append({**self._seconds, "step": time.monotonic() - self._begin})

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_rest: Any) -> None:
        """Told after each update; a rollout's own figures come with the first of them."""
        if "reward" in logs and (state.global_step - 1) % self._num_updates == 0:
            self.told.append({"mean_reward": logs["reward"], "num_tokens": logs["completions/mean_length"]})


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    seconds: dict[str, float] = defaultdict(float)
    steps = Steps(job["train_batch_size"] // job["mini_batch_size"], seconds)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=load_reward(job["reward_file"]),
        args=settings(job, sys.argv[2] + ".run"),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[steps],
    )
    timed(trainer, "_generate_single_turn", "rollout", seconds)
    timed(trainer, "_calculate_rewards", "reward", seconds)
    timed(trainer, "_get_per_token_logps_and_entropies", "log_probs", seconds, lambda: not torch.is_grad_enabled())
    trainer.train()
    rows = [{**row, **told} for row, told in zip(steps.rows, steps.told, strict=True)]
    Path(sys.argv[2]).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
