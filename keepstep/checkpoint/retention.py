"""Which verified checkpoints may go. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def to_delete(verified: Iterable[int], *, keep_last: int, keep_every: int, needed: set[int]) -> list[int]:
    """Steps that no rule keeps, oldest first.

    Kept are the newest `keep_last`, every multiple of `keep_every`, and `needed` (not yet uploaded, resumed from).
    Only verified steps are handed in, so a broken one neither counts nor goes.
    """
    steps = sorted(set(verified))
    newest = set(steps[-keep_last:])
    return [step for step in steps if step not in newest and step % keep_every and step not in needed]
