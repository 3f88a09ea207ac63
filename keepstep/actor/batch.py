"""What the controller sends to the ranks: numpy arrays, right-padded.

With right padding a causal model needs no attention mask: no token of a response sees a padding token, and the
padding's own outputs are masked out of every sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

MIN_LENGTH = 2
"""Columns of a batch at least: a token and one that it predicts."""


@dataclass(frozen=True)
class Batch:
    """B sequences of prompt and response, padded to L tokens. Positions t of the [B, L-1] arrays speak of token t+1."""

    tokens: np.ndarray
    """[B, L] int64."""
    mask: np.ndarray
    """[B, L-1] float32: 1 on response tokens."""
    engine_log_probs: np.ndarray
    """[B, L-1] float32: the engine's log-prob of each sampled token, 0 elsewhere."""
    advantages: np.ndarray
    """[B] float32."""
    lengths: np.ndarray
    """[B] int64: tokens of each sequence without its padding."""
    prompt_lengths: np.ndarray
    """[B] int64: those of its prompt."""

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: slice | Sequence[int]) -> Batch:
        return Batch(*(getattr(self, field.name)[index] for field in fields(self)))

    def trimmed(self) -> Batch:
        """Padded no further than to the longest sequence."""
        longest = max(MIN_LENGTH, int(self.lengths.max()))
        return replace(
            self,
            tokens=self.tokens[:, :longest],
            mask=self.mask[:, : longest - 1],
            engine_log_probs=self.engine_log_probs[:, : longest - 1],
        )

    def with_advantages(self, advantages: np.ndarray) -> Batch:
        return replace(self, advantages=advantages.astype(np.float32))

    def with_mask(self, mask: np.ndarray) -> Batch:
        return replace(self, mask=mask)


def pack(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    pad_id: int,
) -> Batch:
    """Arrays of prompts with their responses, in order."""
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(MIN_LENGTH, *lengths)
    shape = (len(prompts), longest - 1)
    tokens = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    mask, engine = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for row, (prompt, response, scores) in enumerate(zip(prompts, responses, log_probs, strict=True)):
        begin, end = len(prompt), len(prompt) + len(response)
        tokens[row, :begin], tokens[row, begin:end] = prompt, response
        mask[row, begin - 1 : end - 1] = 1.0
        engine[row, begin - 1 : end - 1] = scores
    prompt_lengths = [len(prompt) for prompt in prompts]
    advantages = np.zeros(len(prompts), dtype=np.float32)
    return Batch(tokens, mask, engine, advantages, *(np.array(n, dtype=np.int64) for n in (lengths, prompt_lengths)))


def deal(num_prompts: int, group_size: int, mini_batch_size: int, world_size: int) -> list[list[list[int]]]:
    """Rows of each rank's mini-batches: result[rank][mini_batch] lists response rows.

    Every mini-batch holds the same `mini_batch_size` prompts whatever the world size; its prompts are dealt to the
    ranks in contiguous equal shares.
    """
    dealt: list[list[list[int]]] = [[] for _ in range(world_size)]
    share = mini_batch_size // world_size
    for first in range(0, num_prompts, mini_batch_size):
        for rank in range(world_size):
            begin = (first + rank * share) * group_size
            dealt[rank].append(list(range(begin, begin + share * group_size)))
    return dealt
