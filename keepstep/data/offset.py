"""What a position in one data set means in another one: exact arithmetic, said in a sentence. Pure."""

from __future__ import annotations

from dataclasses import dataclass


def epoch_of(offset: int, num_rows: int) -> int:
    """The epoch, from 1, of the row that is handed out after `offset` rows."""
    return offset // num_rows + 1


@dataclass(frozen=True)
class Position:
    """Where `consumed` rows end in passes over `num_rows` rows."""

    epoch: int
    """From 1; that of the next row."""
    row: int
    """Rows of that epoch handed out already; the next one's place in its order."""


def position(consumed: int, num_rows: int) -> Position:
    return Position(epoch_of(consumed, num_rows), consumed % num_rows)


def explain(consumed: int, *, num_rows_then: int, num_rows_now: int) -> str:
    """What would happen if a run that consumed so many rows of one data set went on with another.

    Args:
        consumed: rows handed out since the run began, over all epochs.
        num_rows_then: rows of an epoch when they were consumed.
        num_rows_now: rows of an epoch of the data found; none: it could not go on at all.
    """
    then = position(consumed, num_rows_then)
    told = (
        f"the run has consumed {consumed:,} rows of {num_rows_then:,}: it is {then.row:,} rows into epoch {then.epoch}"
    )
    if num_rows_now == 0:
        return f"{told}; this data has no row to go on with"
    now = position(consumed, num_rows_now)
    there = f"the same position in these {num_rows_now:,} rows is {now.row:,} rows into epoch {now.epoch}"
    if num_rows_now == num_rows_then:
        return f"{told}; the position would be the same, its rows would not: what was trained on is not what it counts"
    return f"{told}; {there}: {_consequence(then, now, num_rows_then, num_rows_now)}"


def _consequence(then: Position, now: Position, num_rows_then: int, num_rows_now: int) -> str:
    if now.epoch < then.epoch:
        passes = then.epoch - now.epoch
        return f"{passes} {'pass' if passes == 1 else 'passes'} fewer than it has done, so rows would be repeated"
    if now.epoch > then.epoch:
        passes = now.epoch - then.epoch
        return f"{passes} {'pass' if passes == 1 else 'passes'} more than it has done, so rows would be skipped"
    return f"{num_rows_now - now.row:,} rows would remain in this epoch instead of {num_rows_then - then.row:,}"
