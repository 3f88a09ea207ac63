"""Rolling out the validation set under the current policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keepstep.algorithm.best_of import best_of_k, tries
from keepstep.config.schema import RunConfig
from keepstep.controller.groups import EngineGroup
from keepstep.controller.rollouts import Questions
from keepstep.controller.samples import Sample
from keepstep.data.loader import Dataset
from keepstep.data.order import sample_seed
from keepstep.rewards.scoring import Question
from keepstep.rollout.types import Request

MEAN = "val/reward/mean"


@dataclass(frozen=True)
class Validation:
    """What a validation came to."""

    rewards: np.ndarray
    """[P, n]."""
    samples: list[Sample]
    """Of the first prompts."""

    def metrics(self) -> dict[str, float]:
        """Mean reward, and for several responses to a prompt what the best of some would bring."""
        num_responses = self.rewards.shape[1]
        found = {f"val/pass@{k}": best_of_k(self.rewards, k) for k in tries(num_responses)}
        return {MEAN: float(self.rewards.mean())} | found


def validate(
    config: RunConfig,
    val_set: Dataset,
    engines: EngineGroup,
    score: Callable[[list[Question]], list[float]],
    decode: Callable[[list[int]], str],
    *,
    step: int,
) -> Validation:
    """`val_kwargs.n` responses to each row, `val_batch_size` rows at a time, by `val_kwargs.temperature`."""
    settings, size = config.actor_rollout_ref.rollout.val_kwargs, config.data.val_batch_size
    rewards: list[float] = []
    samples: list[Sample] = []
    for first in range(0, len(val_set), size):
        rows = [val_set[index] for index in range(first, min(first + size, len(val_set)))]
        # Seeds of training samples count from 0, so these are others.
        requests = [
            Request(row.prompt_ids, sample_seed(config.trainer.seed, step, first + index, -1 - sample))
            for index, row in enumerate(rows)
            for sample in range(settings.n)
        ]
        responses = engines.generate(
            requests, version=step, max_tokens=config.data.max_response_length, temperature=settings.temperature
        )
        asked = [row for row in rows for _ in range(settings.n)]
        scores = score(Questions(rows, settings.n, decode).of(responses))
        rewards += scores
        missing = config.trainer.log_val_generations * settings.n - len(samples)
        samples += [
            Sample("val", row.prompt_text, decode(response.token_ids), str(row.ground_truth), reward, None)
            for row, response, reward in list(zip(asked, responses, scores, strict=True))[: max(0, missing)]
        ]
    return Validation(np.array(rewards, dtype=np.float64).reshape(len(val_set), settings.n), samples)
