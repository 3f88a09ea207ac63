"""How long the acts of a step take, and whether a running one still fits into a time that ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ACTS = ("rollout", "reward", "log_probs", "update", "weight_sync")
"""What a step is made of, in order."""
DROPPABLE = frozenset({"rollout", "reward", "log_probs", "validation"})
"""Acts that leave the policy as it is: with them the whole step, or the validation, can be given up."""
MARGIN = 1.25


class Pace:
    """Seconds of each act: of the running step, and of the last whole one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._act: str | None = None
        self._since = 0.0

    @contextmanager
    def act(self, name: str) -> Iterator[None]:
        """Count the seconds of a `with` block."""
        self._act, self._since = name, self._clock()
        try:
            yield
        finally:
            self._running[name] = self._running.get(name, 0.0) + self._clock() - self._since
            self._act = None

    def begin_again(self) -> None:
        """What was counted of a step that was broken off is no part of the next one."""
        self._running = {}

    def end_step(self) -> dict[str, float]:
        """Seconds by act since the last call."""
        found, self._running = self._running, {}
        self._last |= found
        return found

    def drops(self, remaining_s: float, save_s: float) -> bool:
        """Whether to give up what runs, with `remaining_s` left in which a save of `save_s` must still fit."""
        return self._act in DROPPABLE and remaining_s < MARGIN * self._left_s() + save_s

    def _left_s(self) -> float:
        """Seconds until the running step, or the validation, is over; infinite where it was never measured."""
        assert self._act is not None
        following = ACTS[ACTS.index(self._act) + 1 :] if self._act in ACTS else ()
        unknown = float("inf")
        took_s, elapsed_s = self._last.get(self._act, unknown), self._clock() - self._since
        # What already takes longer than the last time may take as long again.
        running_s = took_s - elapsed_s if elapsed_s <= took_s else elapsed_s
        return running_s + sum(self._last.get(name, unknown) for name in following)
