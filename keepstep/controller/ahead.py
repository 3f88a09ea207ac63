"""Log-probs of a batch, begun while the engines still sample the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from keepstep.actor.batch import Batch
from keepstep.rollout.types import Response

LogProbs = dict[str, np.ndarray]


class Ranks(Protocol):
    """What is asked of `controller.groups.RankGroup`."""

    def begin_log_probs(self, shards: list[Batch]) -> Any: ...

    def end_log_probs(self, begun: Any) -> list[LogProbs]: ...


class LogProbsAhead:
    """Hands the ranks each micro-batch of a batch as soon as all of its responses are there.

    They are the micro-batches that a rank would cut of the whole batch: the last bits of a forward pass depend on the
    rows that share it, and so the bytes are those of a rollout that was waited for. All ranks get their k-th one
    together, for a forward pass is a collective.
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
        firsts = range(0, len(dealt[0]), micro_batch_size)
        self._pieces = [[rows[first : first + micro_batch_size] for rows in dealt] for first in firsts]
        self._begun: dict[int, Any] = {}
        self._responses: dict[int, Response] = {}

    def add(self, responses: dict[int, Response]) -> None:
        """Take responses by their row; what was there before may come again."""
        self._responses |= responses
        for number, piece in enumerate(self._pieces):
            if number not in self._begun and all(row in self._responses for rows in piece for row in rows):
                self._begun[number] = self._ranks.begin_log_probs([self._part(rows) for rows in piece])

    def of(self, batch: Batch) -> LogProbs:
        """Those of the whole batch, [B, L-1] each; what was not begun is begun now."""
        for number, piece in enumerate(self._pieces):
            if number not in self._begun:
                self._begun[number] = self._ranks.begin_log_probs([batch.rows(rows) for rows in piece])
        found: LogProbs = {}
        for number, piece in enumerate(self._pieces):
            for rows, part in zip(piece, self._ranks.end_log_probs(self._begun[number]), strict=True):
                for name, values in part.items():
                    whole = found.setdefault(name, np.zeros(batch.mask.shape, dtype=values.dtype))
                    # A part that was packed by itself is as wide as its own longest row.
                    whole[rows, : values.shape[1]] = values
        return found

    def _part(self, rows: list[int]) -> Batch:
        return self._pack(rows, [self._responses[row] for row in rows])
