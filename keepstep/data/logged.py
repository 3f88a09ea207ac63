"""Counts of rows that a log names: Keepstep's own lines, or verl's. Pure.

Keepstep says which split a count is of. verl does not: at each start it reads the training files, then the validation
files, and prints `dataset len: N` for each (`filter dataset len: N` after its filter); `Size of train dataloader` ends
the start. Going on from a checkpoint, some of its versions read the training files once more and print their count
again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_OURS = re.compile(r"(?:Loaded (train|val) dataset|(Train|Val) dataset after filtering): (\d+) rows")
_VERL = re.compile(r"(filter )?dataset len: (\d+)|(Size of train dataloader)")


@dataclass(frozen=True)
class SplitCounts:
    """The last counts of one split; None: the log does not name it."""

    raw: int | None = None
    """Rows of the files."""
    filtered: int | None = None
    """Rows that were left after the over-long prompts were dropped (and a cap applied)."""


@dataclass(frozen=True)
class LoggedCounts:
    train: SplitCounts = SplitCounts()
    val: SplitCounts = SplitCounts()
    ambiguous: str = ""
    """Why the counts cannot be told apart; they are None then."""

    def names_any(self) -> bool:
        return (self.train, self.val) != (SplitCounts(), SplitCounts())


def counts_in(text: str) -> LoggedCounts:
    """The last count of each split."""
    ours = _ours(text)
    return ours if ours.names_any() else _verls(text)


def _ours(text: str) -> LoggedCounts:
    found: dict[tuple[str, str], int] = {}
    for raw, filtered, count in _OURS.findall(text):
        found[(raw or filtered.lower(), "raw" if raw else "filtered")] = int(count)
    train, val = (SplitCounts(found.get((split, "raw")), found.get((split, "filtered"))) for split in ("train", "val"))
    return LoggedCounts(train, val)


def _verls(text: str) -> LoggedCounts:
    """Of the last start that came as far as its data loaders."""
    starts: list[list[SplitCounts]] = [[]]
    for filtered, count, loaders in _VERL.findall(text):
        if loaders:
            starts.append([])
        elif not filtered:
            starts[-1].append(SplitCounts(raw=int(count)))
        elif starts[-1] and starts[-1][-1].filtered is None:
            starts[-1][-1] = SplitCounts(starts[-1][-1].raw, int(count))
        else:
            starts[-1].append(SplitCounts(filtered=int(count)))
    *complete, last = starts
    if complete:
        # Before its own two, a start's list may hold the count that the resume before it printed again.
        return _after(_pair(complete[-1][-2:]), last)
    halves = {tuple(last[at : at + 2]) for at in range(0, len(last), 2)}
    return _pair(last[:2]) if len(halves) <= 1 else _unclear(last)


def _pair(counts: Sequence[SplitCounts]) -> LoggedCounts:
    padded = [*counts, SplitCounts(), SplitCounts()]
    return LoggedCounts(padded[0], padded[1])


def _after(found: LoggedCounts, later: list[SplitCounts]) -> LoggedCounts:
    """What stands behind the last complete start must be the same counts again, or it is not clear what it is."""
    rest = later
    while rest and rest[0] == found.train:
        rest = rest[1:]
    return found if rest in ([], [found.val]) else _unclear(later)


def _unclear(counts: list[SplitCounts]) -> LoggedCounts:
    numbers = ", ".join(str(count.raw if count.raw is not None else count.filtered) for count in counts)
    return LoggedCounts(ambiguous=f"its `dataset len` lines ({numbers}) do not say which are the training set's")
