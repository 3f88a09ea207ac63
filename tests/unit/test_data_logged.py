"""Counts of rows in a log: Keepstep's name their split, verl's have to be told apart, or are not guessed at."""

from __future__ import annotations

import pytest

from keepstep.data.logged import LoggedCounts, SplitCounts, counts_in

BUILT = "Size of train dataloader: 7, Size of val dataloader: 1"


def verl(*lines: int | str) -> str:
    """A number is a `dataset len` line, a text stands for itself; each as Ray prints it."""
    texts = [f"dataset len: {line}" if isinstance(line, int) else line for line in lines]
    return "".join(f"\x1b[36m(TaskRunner pid=77)\x1b[0m {text}\n" for text in texts)


def test_our_own_lines_of_several_starts() -> None:
    """The last one of each split counts."""
    text = """
2025-01-01 INFO Loaded train dataset: 30 rows
2025-01-01 INFO Train dataset after filtering: 29 rows
2025-01-01 INFO Loaded val dataset: 5 rows
2025-01-02 INFO Loaded train dataset: 31 rows
2025-01-02 INFO Val dataset after filtering: 4 rows
"""
    assert counts_in(text) == LoggedCounts(SplitCounts(31, 29), SplitCounts(5, 4))
    assert counts_in("Train dataset after filtering: 7 rows") == LoggedCounts(SplitCounts(None, 7))
    assert not counts_in("nothing of that kind").names_any()


@pytest.mark.parametrize(
    ("lines", "train", "val"),
    [
        ([7473, 1319, BUILT], (7473, None), (1319, None)),
        ([7473, "filter dataset len: 7470", 1319, "filter dataset len: 1300", BUILT], (7473, 7470), (1319, 1300)),
        # One filter only: verl's validation set may be left as it is.
        ([7473, "filter dataset len: 7470", 1319, BUILT], (7473, 7470), (1319, None)),
        # Several starts with other data: the last.
        ([100, 20, BUILT, 7473, 1319, BUILT], (7473, None), (1319, None)),
        # A resume reads the training files once more: behind its start, and so before the next start's two.
        ([7473, 1319, BUILT, 7473], (7473, None), (1319, None)),
        ([100, 20, BUILT, 100, 7473, 1319, BUILT, 7473], (7473, None), (1319, None)),
        # A start that ended while it read.
        ([7473], (7473, None), (None, None)),
        ([7473, 1319], (7473, None), (1319, None)),
        ([7473, 1319, 7473, 1319], (7473, None), (1319, None)),
        ([7473, 1319, BUILT, 7473, 1319], (7473, None), (1319, None)),
        ([7473, "Size of train dataloader: 7"], (7473, None), (None, None)),
        # A progress bar in front, a repetition behind.
        (["Filtering: 100%|#| 9/9 [00:01]dataset len: 9 [repeated 2x across cluster]", 3, BUILT], (9, None), (3, None)),
    ],
)
def test_verls_lines(lines: list[int | str], train: tuple, val: tuple) -> None:
    assert counts_in(verl(*lines)) == LoggedCounts(SplitCounts(*train), SplitCounts(*val))


@pytest.mark.parametrize("lines", [[1, 2, 3], [1, 2, 3, 4], [7473, 1319, BUILT, 8000], [7473, 1319, BUILT, 5, 6]])
def test_what_cannot_be_told_apart_is_said(lines: list[int | str]) -> None:
    found = counts_in(verl(*lines))
    assert "do not say which are the training set's" in found.ambiguous and not found.names_any()
