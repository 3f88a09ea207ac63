"""What a step trains on: prompts, a group of responses to each, and their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from keepstep.algorithm.advantages import has_signal
from keepstep.data.loader import Row
from keepstep.rewards.scoring import Question
from keepstep.rollout.types import Response


class Questions:
    """What the reward function is asked about a batch, made as the responses come in.

    Each is made once: one that was handed out while others were still sampled is the one of the finished batch.
    """

    def __init__(self, rows: list[Row], group_size: int, decode: Callable[[list[int]], str]) -> None:
        self._rows, self._group_size, self._decode = rows, group_size, decode
        self._made: dict[int, Question] = {}

    def add(self, responses: dict[int, Response]) -> dict[int, Question]:
        """Those about responses that were not seen before, by place in the batch."""
        new = {place: self._make(place, response) for place, response in responses.items() if place not in self._made}
        self._made |= new
        return new

    def of(self, responses: list[Response]) -> list[Question]:
        """Those of the whole batch, in order."""
        self.add(dict(enumerate(responses)))
        return [self._made[place] for place in range(len(responses))]

    def _make(self, place: int, response: Response) -> Question:
        row = self._rows[place // self._group_size]
        return Question(row.data_source, self._decode(response.token_ids), row.ground_truth, row.extra_info)


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
