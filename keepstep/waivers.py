"""Names that may stand in `resume.allow` beside fields of the contract, and what accepting them gives up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EXACTNESS = "exactness"
"""A replayed step may have other bytes than the checkpoint that stands."""
SCHEDULER = "scheduler"
"""A checkpoint without its scheduler is resumed from; it is rebuilt at the global step."""
MISMATCHED_SIZES = "mismatched_sizes"
"""`trainer.init_from` leaves out tensors of other names or shapes."""
PROBE = "probe"
"""A loaded policy may give other log-probs than the saved one did."""

NAMES = frozenset({EXACTNESS, SCHEDULER, MISMATCHED_SIZES, PROBE})

SAME_BYTES = frozenset({"trainer.total_training_steps", SCHEDULER, MISMATCHED_SIZES})
"""Waivers that promise no other bytes: a longer run takes the same steps, a scheduler is a function of the step, and
what a warm start left out it left out for good."""


def gives_up_exactness(fields: Iterable[str]) -> bool:
    """Whether replayed steps may differ after these were accepted."""
    return bool(set(fields) - SAME_BYTES)


def is_further(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether of two copies of a run's record this one has all that was accepted by the other, and more. Pure."""
    mine, theirs = record.get("waivers", []), other.get("waivers", [])
    return len(mine) > len(theirs) and mine[: len(theirs)] == theirs
