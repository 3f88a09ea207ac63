"""How often to save: what saving costs against what a kill loses. Pure.

With an interval of k steps of t seconds, a save that holds the loop up for c seconds, and a kill every M seconds on
average, a run spends c / (k t) of its time on saving, and at each kill loses half an interval, the saves that are not
verified yet, and the restart: (k t / 2 + v + r) / M. Their sum is least at k t = sqrt(2 c M) (Young, "A first order
approximation to the optimum checkpoint interval", CACM 17(9), 1974).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Medians of a run, in seconds."""

    step_s: float
    save_s: float
    """The loop's stand-still of a save."""
    verify_s: float
    """From the end of the step that is saved until a start may go on from it."""
    restart_s: float | None
    """From the end of an attempt to the next one's first step; None: there was one attempt only."""


@dataclass(frozen=True)
class Choice:
    """What an interval costs, as shares of a run's time."""

    save_freq: int
    saving: float
    losing: float

    @property
    def total(self) -> float:
        return self.saving + self.losing


def measure(events: Sequence[Event], metrics: Iterable[Event]) -> Measured | None:
    """From events.jsonl and metrics.jsonl; None: no step, or no verified checkpoint, is finished yet."""
    step_s = [event["seconds"] for event in events if event.get("event") == "step" and "seconds" in event]
    save_s = [row["timing_s/save"] for row in metrics if "timing_s/save" in row]
    verify_s, restart_s = list(_verified_after(events)), list(_restarts(events))
    if not step_s or not verify_s:
        return None
    return Measured(
        statistics.median(step_s),
        statistics.median(save_s) if save_s else 0.0,
        statistics.median(verify_s),
        statistics.median(restart_s) if restart_s else None,
    )


def choices(measured: Measured, mtbf_s: float, restart_s: float, multiple: int) -> list[Choice]:
    """Every divisor of `multiple` (so that milestones are saved) at which one save is verified before the next begins.

    Args:
        mtbf_s: mean seconds between kills.
        multiple: `resume.prefer_multiple`.
    """
    least = math.ceil(measured.verify_s / measured.step_s)
    found = [k for k in range(1, multiple + 1) if multiple % k == 0 and k >= least] or [multiple]
    return [_choice(k, measured, mtbf_s, restart_s) for k in found]


def best(found: Sequence[Choice]) -> Choice:
    """The cheapest; of equal ones the one that saves less often."""
    return min(found, key=lambda choice: (choice.total, -choice.save_freq))


def _choice(save_freq: int, measured: Measured, mtbf_s: float, restart_s: float) -> Choice:
    interval_s = save_freq * measured.step_s
    lost_s = interval_s / 2 + measured.verify_s + restart_s
    return Choice(save_freq, measured.save_s / (interval_s + measured.save_s), lost_s / mtbf_s)


def _time(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _verified_after(events: Iterable[Event]) -> Iterable[float]:
    """Per checkpoint: seconds from the end of its step to its verification."""
    finished: dict[int, float] = {}
    saved: set[int] = set()
    for event in events:
        kind = event.get("event")
        if kind == "step":
            finished[event["step"]] = _time(event)
        elif kind == "checkpoint_saved":
            saved.add(event["step"])
        elif kind == "checkpoint_verified" and event["step"] in saved & finished.keys():
            saved.discard(event["step"])
            yield _time(event) - finished[event["step"]]


def _restarts(events: Sequence[Event]) -> Iterable[float]:
    """Per attempt but the first: seconds from the last word of the one before to its first step."""
    last: Event | None = None
    waiting: float | None = None
    for event in events:
        if event.get("event") == "attempt_started" and last is not None:
            waiting = _time(last)
        elif event.get("event") == "step" and waiting is not None:
            yield _time(event) - waiting
            waiting = None
        last = event
