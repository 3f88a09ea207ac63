"""Which checkpoints stay and which may go. Pure: what is on disk (or in the store) in, the decision with reasons out.

Kept is the union of: the newest `keep_last`, every multiple of `keep_every`, the best `keep_best` by metric, those that
the store still has to confirm, the one resumed from, pinned ones. Over `max_disk_bytes` only the newest, the newest
multiple, the best and what is in use or pinned have a claim; the others go, oldest first, until the rest fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """A verified checkpoint that this run wrote."""

    step: int
    metric: float | None = None
    """What "best" is measured by, taken at this very step; None: not validated at this step."""
    num_bytes: int = 0
    """What its deletion frees."""


@dataclass(frozen=True)
class Rules:
    keep_last: int
    keep_every: int
    keep_best: int = 0
    higher_is_better: bool = True
    max_disk_bytes: int | None = None


@dataclass
class Decision:
    kept: dict[int, list[str]] = field(default_factory=dict)
    """Step -> the rules that keep it."""
    deleted: dict[int, str] = field(default_factory=dict)
    """Step -> why no rule keeps it; in ascending order of steps."""
    best: int | None = None
    """Best of those that stay; None: none has the metric."""


def decide(
    entries: Iterable[Entry],
    rules: Rules,
    *,
    waiting: frozenset[int] = frozenset(),
    in_use: frozenset[int] = frozenset(),
    pinned: frozenset[int] = frozenset(),
) -> Decision:
    """Apply the rules.

    Args:
        waiting: steps that belong into the store and are not confirmed there yet.
        in_use: steps that are resumed from or are being uploaded.
        pinned: steps that a person keeps.
    """
    ordered = sorted(entries, key=lambda entry: entry.step)
    steps = [entry.step for entry in ordered]
    multiples = [step for step in steps if step and step % rules.keep_every == 0]
    best = best_steps(ordered, rules.keep_best, rules.higher_is_better)
    # Each rule with whether it holds when the disk is over its limit.
    claims: list[tuple[str, bool, Iterable[int]]] = [
        ("newest", True, steps[-1:]),
        (f"newest {rules.keep_last}", False, steps[-rules.keep_last :]),
        (f"newest multiple of {rules.keep_every}", True, multiples[-1:]),
        (f"multiple of {rules.keep_every}", False, multiples),
        ("best", True, best[:1]),
        (f"best {rules.keep_best}", False, best),
        ("not in the store yet", False, waiting),
        ("in use", True, in_use),
        ("pinned", True, pinned),
    ]
    found = Decision()
    firm: set[int] = set()
    for reason, is_firm, claimed in claims:
        for step in set(claimed).intersection(steps):
            found.kept.setdefault(step, []).append(reason)
            firm |= {step} if is_firm else set()
    found.deleted = {step: "no rule keeps it" for step in steps if step not in found.kept}
    _fit(ordered, rules.max_disk_bytes, firm, found)
    staying = [entry for entry in ordered if entry.step in found.kept]
    found.best = next(iter(best_steps(staying, 1, rules.higher_is_better)), None)
    return found


def best_steps(entries: Sequence[Entry], count: int, higher_is_better: bool = True) -> list[int]:
    """The `count` best by metric, best first. Of equals the later one wins; what is missing or NaN is never best."""
    sign = 1.0 if higher_is_better else -1.0
    measured = [
        (sign * entry.metric, entry.step)
        for entry in entries
        if entry.metric is not None and not math.isnan(entry.metric)
    ]
    return [step for _, step in sorted(measured, reverse=True)[:count]]


def _fit(ordered: Sequence[Entry], max_disk_bytes: int | None, firm: set[int], found: Decision) -> None:
    """Move kept steps without a firm claim to `deleted`, oldest first, until what stays fits."""
    if max_disk_bytes is None:
        return
    num_bytes = sum(entry.num_bytes for entry in ordered if entry.step in found.kept)
    for entry in ordered:
        if num_bytes <= max_disk_bytes:
            break
        if entry.step in found.kept and entry.step not in firm:
            reasons = found.kept.pop(entry.step)
            found.deleted[entry.step] = f"over checkpoint.max_disk_bytes (was kept as: {', '.join(reasons)})"
            num_bytes -= entry.num_bytes
    found.deleted = dict(sorted(found.deleted.items()))
