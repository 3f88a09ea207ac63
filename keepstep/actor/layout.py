"""How the rows of a micro-batch stand in a forward pass, and what they cost there. numpy, no model.

padded    side by side, each as long as the longest
packed    one behind the other in one row, without padding
grouped   packed, and each prompt once, before all the responses to it: its part of the pass is made once for a group
          instead of once for each response (Prefix Grouper, arXiv:2506.05433)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.actor.batch import Batch

Layout = Literal["padded", "packed", "grouped"]


@dataclass(frozen=True)
class Packed:
    """B rows of at most L tokens in one row of S tokens."""

    tokens: np.ndarray
    """[S] int64."""
    positions: np.ndarray
    """[S] int64: each token's place in its own sequence; responses go on where their prompt ends."""
    places: np.ndarray
    """[B, L] int64: where each token of each row stands, anywhere for padding."""
    owners: np.ndarray
    """[S] int64: a place of [B, L], counted through, whose token this is; the last where rows share it."""


def lay_out(batch: Batch, layout: Layout) -> Packed:
    """The batch packed, rows with the same prompt behind each other in the order in which the prompts first come."""
    places = np.zeros(batch.tokens.shape, dtype=np.int64)
    end = 0
    for rows in by_prompt(batch) if layout == "grouped" else ([row] for row in range(len(batch))):
        prompt = int(batch.prompt_lengths[rows[0]])
        places[rows, :prompt] = np.arange(end, end + prompt)
        end += prompt
        for row in rows:
            length = int(batch.lengths[row])
            places[row, prompt:length] = np.arange(end, end + length - prompt)
            end += length - prompt
    tokens, positions, owners = (np.zeros(end, dtype=np.int64) for _ in range(3))
    there = np.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    tokens[places[there]] = batch.tokens[there]
    positions[places[there]] = there.nonzero()[1]
    owners[places[there]] = np.flatnonzero(there)
    return Packed(tokens, positions, places, owners)


def by_prompt(batch: Batch) -> list[list[int]]:
    """Rows that have the same prompt, in the order in which the prompts first come."""
    found: dict[bytes, list[int]] = {}
    for row, (tokens, length) in enumerate(zip(batch.tokens, batch.prompt_lengths, strict=True)):
        found.setdefault(tokens[:length].tobytes(), []).append(row)
    return list(found.values())


@dataclass(frozen=True)
class Costs:
    """What rows of a batch cost in a forward pass, in tokens."""

    layout: Layout
    lengths: Sequence[int]
    prompt_lengths: Sequence[int]
    groups: Sequence[int]
    """Number of the group that each row belongs to; rows of one are best kept together."""

    @staticmethod
    def of(batch: Batch, layout: Layout) -> Costs:
        groups = list(range(len(batch)))
        if layout == "grouped":
            for number, rows in enumerate(by_prompt(batch)):
                for row in rows:
                    groups[row] = number
        return Costs(layout, batch.lengths.tolist(), batch.prompt_lengths.tolist(), groups)

    def __call__(self, rows: Sequence[int]) -> int:
        """Tokens of a pass over these rows, padding and all."""
        if self.layout == "padded":
            return max(self.lengths[row] for row in rows) * len(rows)
        prompts = {self.groups[row]: self.prompt_lengths[row] for row in rows}
        return sum(prompts.values()) + sum(self.lengths[row] - self.prompt_lengths[row] for row in rows)
