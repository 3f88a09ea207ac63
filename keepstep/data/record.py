"""The data set as the run recorded it at its first start, and what is different now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.data.count import FileRecord
from keepstep.errors import DataError

Record = dict[str, Any]


def build(train: Sequence[FileRecord], val: Sequence[FileRecord]) -> Record:
    """The data set's part of run.json. `num_rows` are the training rows of all files, before any filter.

    Raises:
        DataError: there are no training rows.
    """
    num_rows = sum(file.rows for file in train)
    if num_rows == 0:
        names = ", ".join(file.path for file in train) or "none is named"
        raise DataError(f"The training files hold no rows: {names}.", "Check data.train_files.")
    return {
        "num_rows": num_rows,
        "files": [file.to_record() for file in train],
        "val_files": [file.to_record() for file in val],
    }


def compare(recorded: Record, found: Record) -> list[str]:
    """Differences, one sentence each: the file, what was expected, what was found.

    Content decides, in the order of the files: a file that moved with its bytes is the same file.
    """
    return [
        difference
        for key, name in (("files", "training"), ("val_files", "validation"))
        for difference in _compare_files(name, recorded.get(key, []), found.get(key, []))
    ]


def _compare_files(name: str, recorded: list[Record], found: list[Record]) -> list[str]:
    if len(recorded) != len(found):
        return [
            f"{name}: {_count(recorded)} expected ({_names(recorded)}), {_count(found)} found ({_names(found)})",
        ]
    return [
        difference
        for expected, actual in zip(recorded, found, strict=True)
        if (difference := _compare_file(expected, actual)) is not None
    ]


def _compare_file(expected: Record, actual: Record) -> str | None:
    moved = "" if expected["path"] == actual["path"] else f" (in place of {expected['path']})"
    for key, unit in (("rows", "rows"), ("bytes", "bytes")):
        if expected[key] != actual[key]:
            return f"{actual['path']}{moved}: {expected[key]} {unit} expected, {actual[key]} found"
    if expected["footer_sha256"] != actual["footer_sha256"]:
        then, now = expected["footer_sha256"][:12], actual["footer_sha256"][:12]
        return f"{actual['path']}{moved}: same size, other content: footer SHA-256 {then}… expected, {now}… found"
    return None


def _count(files: list[Record]) -> str:
    return f"{len(files)} files with {sum(file['rows'] for file in files)} rows"


def _names(files: list[Record]) -> str:
    return ", ".join(file["path"] for file in files[:5]) + (", …" if len(files) > 5 else "") or "none"
