"""Numbers by step, thinned to what a screen can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from keepstep.doctor.evidence import Row

MAX_BUCKETS = 240
"""Buckets of one series: more are not told apart on a screen, and 10,000 steps must not make a heavy file."""
BEYOND = 1e200
"""A number of this size is a bug, and what is computed from it here would overflow."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring steps as one: their extremes and their mean. `number` is the same in all series of equal width."""

    number: int
    first: int
    last: int
    low: float
    mean: float
    high: float

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class Series:
    """One metric over the steps that have it; at least one has."""

    name: str
    buckets: tuple[Bucket, ...]
    newest: float
    """Its value at its last step."""


def last_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The last row of every step, by step: a step that was trained again counts as it was trained last."""
    by_step = {row.step: row for row in rows if row.step is not None}
    return tuple(by_step[step] for step in sorted(by_step))


def names(rows: Sequence[Row]) -> list[str]:
    """Names of all metrics, in the order in which they first appear."""
    found = dict.fromkeys(name for row in rows for name in row.value if number(row, name) is not None)
    return [name for name in found if name not in ("step", "attempt")]


def width(rows: Sequence[Row], most: int = MAX_BUCKETS) -> int:
    """Steps per bucket, so that the steps of `rows` (ascending) make at most `most` buckets, and one of them more."""
    steps = [row.step for row in rows if row.step is not None]
    return max(1, math.ceil((steps[-1] - steps[0] + 1) / most)) if steps else 1


def series(rows: Sequence[Row], name: str, steps_per_bucket: int) -> Series | None:
    """A metric's series; None where no step has it as a finite number."""
    return make(name, [(row.step or 0, value) for row in rows if (value := number(row, name)) is not None],
                steps_per_bucket)  # fmt: skip


def make(name: str, points: Sequence[tuple[int, float]], steps_per_bucket: int) -> Series | None:
    """The series of (step, value), steps ascending; None where there is none."""
    if not points:
        return None
    groups = groupby(points, key=lambda point: point[0] // steps_per_bucket)
    return Series(name, tuple(_bucket(number, list(group)) for number, group in groups), points[-1][1])


def number(row: Row, name: str) -> float | None:
    """A metric of one row, where it is a number that can be drawn."""
    value = row.number(name)
    return None if value is None or abs(value) > BEYOND else value


def _bucket(number: int, points: Sequence[tuple[int, float]]) -> Bucket:
    values = [value for _, value in points]
    return Bucket(number, points[0][0], points[-1][0], min(values), math.fsum(values) / len(values), max(values))
