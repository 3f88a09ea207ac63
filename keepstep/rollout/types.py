"""What a rollout is: requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One response to sample. Its seed alone decides its randomness, so any engine may serve it in any order."""

    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Response:
    """Sampled tokens (the end-of-sequence token included, when sampled) and the engine's log-prob of each."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    """False: cut off at the token limit."""


@dataclass(frozen=True)
class Sampled:
    """What an engine has brought about of a rollout since it was last asked."""

    finished: list[tuple[int, Response]]
    """By place among the requests that it was given."""
    done: bool
    """Nothing is left to be sampled."""
