"""What a step trains on: prompts, a group of responses to each, and their scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from keepstep.algorithm.advantages import has_signal
from keepstep.data.loader import Row
from keepstep.rollout.types import Response


@dataclass(frozen=True)
class Rollouts:
    """P prompts with G responses each, in order of the prompts."""

    rows: list[Row]
    responses: list[Response]
    """P * G."""
    scores: np.ndarray
    """[P, G], as the reward function gave them."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group_size(self) -> int:
        return int(self.scores.shape[1])

    def __add__(self, other: Rollouts) -> Rollouts:
        scores = np.concatenate([self.scores, other.scores])
        return Rollouts(self.rows + other.rows, self.responses + other.responses, scores)

    def first(self, num_prompts: int) -> Rollouts:
        return self.only(list(range(num_prompts)))

    def with_signal(self) -> Rollouts:
        """Without the groups whose scores are all equal (DAPO, arXiv:2503.14476, eq. 11)."""
        return self.only(has_signal(torch.from_numpy(self.scores)).nonzero().flatten().tolist())

    def only(self, prompts: list[int]) -> Rollouts:
        size = self.group_size
        responses = [self.responses[prompt * size + sample] for prompt in prompts for sample in range(size)]
        return Rollouts([self.rows[prompt] for prompt in prompts], responses, self.scores[prompts])
