"""Log-probs of a batch, begun while the engines still sample the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from keepstep.actor.batch import Batch
from keepstep.actor.micro_batches import by_count
from keepstep.rollout.types import Response

LogProbs = dict[str, np.ndarray]


class Ranks(Protocol):
    """What is asked of `controller.groups.RankGroup`."""

    def begin_log_probs(self, shards: list[Batch]) -> Any: ...

    def have_log_probs(self, begun: Any) -> bool: ...

    def end_log_probs(self, begun: list[Any]) -> list[list[LogProbs]]: ...


LEAST_AHEAD = 2
"""Micro-batches that ranks may have before them, however slow they are."""


class LogProbsAhead:
    """Hands the ranks micro-batches of a batch whose responses are there, on all of them.

    They are the micro-batches that a rank would cut of the whole batch: the last bits of a forward pass depend on the
    rows that share it, and so the bytes are those of a rollout that was waited for. All ranks get their k-th one
    together, for a forward pass is a collective.

    What ranks have before them cannot be taken back, and whatever else is asked of them (weights for an engine that was
    lost, the last save within a grace) comes after it: they get no more at once than twice what they just worked off.
    """

    def __init__(
        self,
        ranks: Ranks,
        dealt: list[list[int]],
        micro_batch_size: int,
        pack: Callable[[list[int], list[Response]], Batch],
    ) -> None:
        """
        Args:
            dealt: rows of the batch that each rank gets, as many for each.
            pack: from rows, and the responses that stand there.
        """
        self._ranks, self._pack = ranks, pack
        self._pieces = list(zip(*(by_count(rows, micro_batch_size) for rows in dealt), strict=True))
        self._begun: dict[int, Any] = {}
        self._unanswered: set[int] = set()
        self._responses: dict[int, Response] = {}

    def add(self, responses: dict[int, Response]) -> None:
        """Take responses by their row; what was there before may come again."""
        self._responses |= responses
        whole = [
            number
            for number, piece in enumerate(self._pieces)
            if number not in self._begun and all(row in self._responses for rows in piece for row in rows)
        ]
        answered = {number for number in self._unanswered if self._ranks.have_log_probs(self._begun[number])}
        self._unanswered -= answered
        num_more = max(LEAST_AHEAD, 2 * len(answered)) - len(self._unanswered)
        for number in whole[: max(0, num_more)]:
            self._begin(number)

    def of(self, batch: Batch) -> LogProbs:
        """Those of the whole batch, [B, L-1] each; what was not begun is begun now."""
        for number in range(len(self._pieces)):
            if number not in self._begun:
                self._begin(number)
        answers = self._ranks.end_log_probs([self._begun[number] for number in range(len(self._pieces))])
        found: LogProbs = {}
        for piece, parts in zip(self._pieces, answers, strict=True):
            for rows, part in zip(piece, parts, strict=True):
                for name, values in part.items():
                    whole = found.setdefault(name, np.zeros(batch.mask.shape, dtype=values.dtype))
                    # A part that was packed by itself is as wide as its own longest row.
                    whole[rows, : values.shape[1]] = values
        return found

    def _begin(self, number: int) -> None:
        shards = [self._pack(rows, [self._responses[row] for row in rows]) for rows in self._pieces[number]]
        self._begun[number] = self._ranks.begin_log_probs(shards)
        self._unanswered.add(number)
