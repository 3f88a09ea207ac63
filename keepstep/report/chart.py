"""Charts as geometry: series in, SVG paths and ticks out. Pure; the template draws them.

The plane is `WIDTH` x `HEIGHT` units and is stretched to its place; labels stand beside it and keep their size on a
phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from keepstep.report.series import Bucket, Series
from keepstep.report.texts import number_text

WIDTH, HEIGHT = 1000, 400
NUM_TICKS = 4
NUM_COLOURS = 8
MAX_DOTS = 60
"""More of them would run into each other."""
_TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class Tick:
    """A label beside the plane, at a share (0 to 100) of its width or height."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """One drawn series. `line` and `area` are path data; an empty one is not drawn."""

    label: str
    colour: int
    newest: str
    line: str = ""
    area: str = ""
    dots: str = ""
    css: str = ""
    """A class that colours it instead of `colour`."""


@dataclass(frozen=True)
class Hint:
    """What a pointer over a column of the plane reads."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Chart:
    """What the template needs of one chart."""

    title: str
    summary: str
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hints: tuple[Hint, ...]
    cuts: tuple[float, ...] = ()
    """Where training went on from an earlier step, in units of the plane."""


@dataclass(frozen=True)
class Trail:
    """Where a run was when: (seconds, step), ascending in time."""

    label: str
    css: str
    points: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class _Plane:
    """From values to units."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return WIDTH * _share(step, self.first, self.last)

    def y(self, value: float) -> float:
        return HEIGHT * (1 - _share(value, self.low, self.high))


def line_chart(title: str, found: Sequence[Series], cuts: Sequence[int] = (), dots: Sequence[str] = ()) -> Chart:
    """One line per series, with a band between the extremes where steps were put together.

    Args:
        cuts: steps after which training went back.
        dots: names of series that few steps have; drawn as points.
    """
    buckets = [bucket for series in found for bucket in series.buckets]
    ticks = nice_ticks(min(bucket.low for bucket in buckets), max(bucket.high for bucket in buckets))
    plane = _plane(buckets, ticks)
    marks = [_line_mark(series, number, plane, series.name in dots) for number, series in enumerate(found)]
    return _chart(title, found, marks, plane, ticks, cuts)


def stacked_chart(title: str, found: Sequence[Series], cuts: Sequence[int] = ()) -> Chart:
    """The means of several series on top of each other; one that a bucket lacks counts as 0 there."""
    buckets = [bucket for series in found for bucket in series.buckets]
    middles = {bucket.number: bucket.middle for bucket in buckets}
    numbers = sorted(middles)
    means = [{bucket.number: bucket.mean for bucket in series.buckets} for series in found]
    ticks = nice_ticks(0.0, max(math.fsum(own.get(number, 0.0) for own in means) for number in numbers))
    plane = _plane(buckets, ticks)
    below = [0.0] * len(numbers)
    marks = []
    for colour, (series, own) in enumerate(zip(found, means, strict=True)):
        above = [base + own.get(number, 0.0) for base, number in zip(below, numbers, strict=True)]
        upper, lower = (
            [(plane.x(middles[number]), plane.y(value)) for number, value in zip(numbers, values, strict=True)]
            for values in (above, below)
        )
        marks.append(Mark(series.name, colour % NUM_COLOURS, number_text(series.newest), area=_area(upper, lower)))
        below = above
    return _chart(title, found, marks, plane, ticks, cuts)


def progress_chart(title: str, runs: Sequence[Trail]) -> Chart:
    """Steps over wall time, one line per trail, from the first time of all."""
    points = [point for trail in runs for point in trail.points]
    begin, end = min(time for time, _ in points), max(time for time, _ in points)
    ticks = nice_ticks(0.0, max(step for _, step in points))
    plane = _Plane(begin, end, ticks[0], ticks[-1])
    marks = []
    for trail in runs:
        drawn = [(plane.x(time), plane.y(step)) for time, step in trail.points]
        dots = f"M{_unit(drawn[-1][0])} {_unit(drawn[-1][1])}h0" if drawn else ""
        marks.append(Mark(trail.label, 0, "", _path(drawn), dots=dots, css=trail.css))
    unit_s, unit = next((u for u in _TIME_UNITS if end - begin >= 2 * u[0]), _TIME_UNITS[-1])
    times = [tick for tick in nice_ticks(0.0, (end - begin) / unit_s, 5) if tick * unit_s <= end - begin]
    x_ticks = tuple(Tick(_round(100 * _share(begin + t * unit_s, begin, end)), f"{t:g} {unit}") for t in times)
    summary = "; ".join(f"{trail.label}: to step {trail.points[-1][1]}" for trail in runs if trail.points)
    return Chart(title, summary, tuple(marks), x_ticks, _y_ticks(plane, ticks), ())


def nice_ticks(low: float, high: float, num: int = NUM_TICKS) -> list[float]:
    """Round numbers, some `num` of them, the first at or below `low` and the last at or above `high`."""
    if not low < high:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / num
    if not math.isfinite(rough) or rough < 1e-300:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _plane(buckets: Sequence[Bucket], ticks: Sequence[float]) -> _Plane:
    first, last = min(bucket.first for bucket in buckets), max(bucket.last for bucket in buckets)
    return _Plane(first, last, ticks[0], ticks[-1])


def _line_mark(series: Series, number: int, plane: _Plane, dotted: bool) -> Mark:
    middle = [(plane.x(bucket.middle), plane.y(bucket.mean)) for bucket in series.buckets]
    area = ""
    if any(bucket.low < bucket.high for bucket in series.buckets):
        area = _area(
            [(plane.x(bucket.middle), plane.y(bucket.high)) for bucket in series.buckets],
            [(plane.x(bucket.middle), plane.y(bucket.low)) for bucket in series.buckets],
        )
    # A round cap on a line of no length is a point that stretching does not deform.
    as_dots = len(middle) == 1 or (dotted and len(middle) <= MAX_DOTS)
    dots = "".join(f"M{_unit(x)} {_unit(y)}h0" for x, y in middle) if as_dots else ""
    return Mark(series.name, number % NUM_COLOURS, number_text(series.newest), _path(middle), area, dots)


def _chart(
    title: str, found: Sequence[Series], marks: Sequence[Mark], plane: _Plane, ticks: Sequence[float],
    cuts: Sequence[int],
) -> Chart:  # fmt: skip
    return Chart(
        title, _summary(found), tuple(marks), _x_ticks(plane), _y_ticks(plane, ticks), _hints(found, plane),
        _cuts(cuts, plane),
    )  # fmt: skip


def _hints(found: Sequence[Series], plane: _Plane) -> tuple[Hint, ...]:
    """One column per bucket."""
    by_number: dict[int, list[tuple[str, Bucket]]] = {}
    for series in found:
        for bucket in series.buckets:
            by_number.setdefault(bucket.number, []).append((series.name, bucket))
    columns = [by_number[number] for number in sorted(by_number)]
    centres = [plane.x(column[0][1].middle) for column in columns]
    borders = [0.0, *((one + other) / 2 for one, other in pairwise(centres)), float(WIDTH)]
    return tuple(
        Hint(_round(left), _round(right - left), _hint_text(column))
        for column, (left, right) in zip(columns, pairwise(borders), strict=True)
    )


def _hint_text(column: Sequence[tuple[str, Bucket]]) -> str:
    first, last = min(bucket.first for _, bucket in column), max(bucket.last for _, bucket in column)
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return "\n".join([steps, *(f"{name} {number_text(bucket.mean)}" for name, bucket in column)])


def _summary(found: Sequence[Series]) -> str:
    """What the chart shows, for those who do not see it."""
    parts = []
    for series in found:
        first, last = series.buckets[0], series.buckets[-1]
        low, high = min(b.low for b in series.buckets), max(b.high for b in series.buckets)
        parts.append(
            f"{series.name}, steps {first.first} to {last.last}: {number_text(first.mean)} at first, "
            f"{number_text(series.newest)} at last, between {number_text(low)} and {number_text(high)}"
        )
    return "; ".join(parts)


def _x_ticks(plane: _Plane) -> tuple[Tick, ...]:
    if plane.first == plane.last:
        return (Tick(50.0, str(int(plane.first))),)
    inside = [tick for tick in nice_ticks(plane.first, plane.last, 5) if plane.first <= tick <= plane.last]
    return tuple(Tick(_round(100 * _share(t, plane.first, plane.last)), str(int(t))) for t in inside if t == int(t))


def _y_ticks(plane: _Plane, ticks: Sequence[float]) -> tuple[Tick, ...]:
    return tuple(Tick(_round(100 * (1 - _share(t, plane.low, plane.high))), number_text(t)) for t in ticks)


def _cuts(steps: Sequence[int], plane: _Plane) -> tuple[float, ...]:
    return tuple(_round(plane.x(step)) for step in sorted(set(steps)) if plane.first <= step <= plane.last)


def _area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    return f"{_path(upper)}{_path(list(reversed(lower))).replace('M', 'L', 1)}Z"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_unit(x)} {_unit(y)}" for x, y in points)


def _share(value: float, low: float, high: float) -> float:
    # In halves: the difference of two huge numbers may be more than a float holds.
    return 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)


def _round(value: float) -> float:
    return round(value, 1)


def _unit(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
