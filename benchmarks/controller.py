"""The controller's own time per step: the real loop, with ranks and engines that answer at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from keepstep.config.load import load
from keepstep.controller.leaving import Leaving
from keepstep.controller.state import TrainState
from keepstep.controller.trainer import Trainer
from keepstep.data.loader import Dataset, Row
from keepstep.rewards.scoring import Scorer
from keepstep.rollout.types import Request, Response

PROMPT_LENGTH, RESPONSE_LENGTH, GROUP_SIZE, NUM_STEPS = 128, 256, 8, 5
RANKS, BATCHES = (2, 8, 32, 128), (128, 512, 2048)


class Ranks:
    """Log-probs as the engine says them; no update."""

    def log_probs(self, shards: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        return [{"ref": shard.engine_log_probs} for shard in shards]

    def update(self, shards: Sequence[Any], _log_probs: Any, _mini_batches: Any) -> tuple[dict[str, float], list[Any]]:
        return {"actor/pg_loss": 0.0, "actor/kl_loss": 0.0, "actor/lr": 0.0}, [s.engine_log_probs for s in shards]

    def full_weights(self) -> None: ...


class Engines:
    """The same tokens for everybody, made beforehand."""

    response = Response(list(range(3, 3 + RESPONSE_LENGTH)), [-1.0] * RESPONSE_LENGTH, True)

    def generate(self, requests: list[Request], **_rest: Any) -> list[Response]:
        return [self.response] * len(requests)

    def update_weights(self, _weights: Any, _version: int) -> None: ...


def controller_times() -> dict[str, float]:
    """Median seconds of a step by number of ranks (512 prompts) and by prompts (8 ranks)."""
    found = {f"{ranks} ranks, 512 prompts": step_time(ranks, 512) for ranks in RANKS}
    return found | {f"8 ranks, {prompts} prompts": step_time(8, prompts) for prompts in BATCHES}


def step_time(num_ranks: int, num_prompts: int) -> float:
    config = load(
        "quickstart",
        [
            f"trainer.n_gpus_per_node={num_ranks}", f"data.train_batch_size={num_prompts}", "trainer.test_freq=-1",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}", f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
            f"data.max_prompt_length={PROMPT_LENGTH}", f"data.max_response_length={RESPONSE_LENGTH}",
        ],
    )  # fmt: skip
    rows = [Row(i, list(range(3, 3 + PROMPT_LENGTH)), "", "bench", "", {}) for i in range(num_prompts)]
    scorer = Scorer(lambda **_: 1.0, config.reward_model, config.custom_reward_function)
    parts: Any = SimpleNamespace(
        ranks=Ranks(), engines=Engines(), saver=None, val_set=None, pad_id=0, train_set=Dataset(rows, len(rows), ""),
        scorer=scorer, decode=lambda ids: "", keep=lambda step, samples: None, report=lambda step, metrics: None,
        report_validation=lambda step, metrics: None,
        probe_prompts=[], leaving=Leaving(3600.0, lambda failure: None),
    )  # fmt: skip
    trainer = Trainer(config, parts, TrainState(), NUM_STEPS)
    seconds = []
    for _ in range(NUM_STEPS):
        begin = time.monotonic()
        trainer.step()
        seconds.append(time.monotonic() - begin)
    return round(statistics.median(seconds[1:]), 4)


if __name__ == "__main__":
    print(Path(__file__).name, controller_times())
