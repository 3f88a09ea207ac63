"""Rows of parquet files, from their footers, counted in a process of its own: a corrupt file can kill its reader.

A reader that dies takes no other file with it: the one that killed it is named, and the rest goes to the next reader.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import DataError, last_line

TIMEOUT_S = 1800.0
"""Longest silence of a reader."""
NUM_THREADS = 16
"""Files that a reader has open at once; disks and stores answer them side by side."""
_MAX_NAMED = 20


@dataclass(frozen=True)
class FileRecord:
    """One data file as it stands in run.json. `footer_sha256` covers the footer: schema, row groups, their places."""

    path: str
    rows: int
    bytes: int
    footer_sha256: str
    columns: tuple[tuple[str, str], ...] = ()
    """(name, type) of each; in run.json they stand once per schema, by `schema_sha256`."""

    @property
    def schema_sha256(self) -> str:
        """Digest of names and types, in their order."""
        return hashlib.sha256(json.dumps(self.columns, separators=(",", ":")).encode()).hexdigest()

    def to_record(self) -> dict[str, Any]:
        record = {"path": self.path, "rows": self.rows, "bytes": self.bytes, "footer_sha256": self.footer_sha256}
        return record | ({"schema_sha256": self.schema_sha256} if self.columns else {})


def count_rows(files: Sequence[str], *, columns: Sequence[str] = ()) -> list[FileRecord]:
    """Rows, size, columns and footer digest of each file, from the footers alone.

    Args:
        columns: which every file must have.

    Raises:
        DataError: files that are missing, empty, truncated, damaged, not parquet or without a column; all are named.
    """
    return _settled(files, _Survey(files, columns, deep=False))


def read_rows(files: Sequence[str]) -> tuple[list[FileRecord], str]:
    """`count_rows` that reads every page, and the digest of all rows in the order of the files (`row_digest`).

    Raises:
        DataError: as `count_rows`, and a page that cannot be decoded or is not what its CRC says.
    """
    survey = _Survey(files, (), deep=True)
    records = _settled(files, survey)
    if files and not survey.rows_sha256:
        raise DataError("The process that read the rows was killed between two files.", "Start the check again.")
    return records, survey.rows_sha256


def _settled(files: Sequence[str], survey: _Survey) -> list[FileRecord]:
    answers = survey.take(list(range(len(files))), NUM_THREADS)
    found = [answers[index] for index in range(len(files))]
    problems = [f"{path} {answer}" for path, answer in zip(files, found, strict=True) if isinstance(answer, str)]
    if problems:
        more = f"\n  and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise DataError(
            f"{len(problems)} of {len(files)} data files cannot be used:\n  "
            + "\n  ".join(problems[:_MAX_NAMED])
            + more,
            "Put them right, or leave them out of data.train_files and data.val_files.",
        )
    return [answer for answer in found if isinstance(answer, FileRecord)]


@dataclass
class _Reading:
    """What one reader said before it ended."""

    answers: dict[int, FileRecord | str] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    rows_sha256: str = ""
    death: str = ""
    """How it ended, if not by itself."""

    def take(self, line: str) -> None:
        found = json.loads(line)
        if "rows_sha256" in found:
            self.rows_sha256 = found["rows_sha256"]
        elif "begin" in found:
            self.begun.append(found["begin"])
        elif "problem" in found:
            self.answers[found["end"]] = found["problem"]
        else:
            record = found["record"]
            columns = tuple((name, kind) for name, kind in record.pop("columns"))
            self.answers[found["end"]] = FileRecord(**record, columns=columns)

    def unanswered(self) -> list[int]:
        return [index for index in dict.fromkeys(self.begun) if index not in self.answers]


class _Survey:
    """Readers, one after the other, until every file has its answer: a record, or a sentence about what is wrong."""

    def __init__(self, files: Sequence[str], columns: Sequence[str], *, deep: bool) -> None:
        self._files = files
        self._columns = columns
        self._deep = deep
        self.rows_sha256 = ""

    def take(self, indices: list[int], num_threads: int) -> dict[int, FileRecord | str]:
        """Answers by index. With one thread the file that kills a reader is the only one begun and not answered."""
        answers: dict[int, FileRecord | str] = {}
        waiting = indices
        while waiting:
            # A deep read hashes the rows in the order of the files.
            reading = self._read(waiting, 1 if self._deep else num_threads)
            answers |= reading.answers
            suspects = reading.unanswered()
            if len(suspects) == 1:
                answers[suspects[0]] = f"is unreadable: {reading.death}"
            elif suspects:
                answers |= self.take(suspects, num_threads=1)
            elif not reading.answers:
                raise DataError(f"The process that reads parquet files does not start: {reading.death}.")
            # Of one reader that took in all rows; another one's would lack those before it.
            self.rows_sha256 = reading.rows_sha256 if len(reading.answers) == len(self._files) else ""
            waiting = [index for index in waiting if index not in answers]
        return answers

    def _read(self, indices: list[int], num_threads: int) -> _Reading:
        request = {
            "files": [self._files[index] for index in indices],
            "columns": list(self._columns),
            "deep": self._deep,
            "num_threads": num_threads,
        }
        reading = _Reading()
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as complaints:
            source.write(json.dumps(request).encode())
            source.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-m", "keepstep.data.reader"], stdin=source, stdout=subprocess.PIPE, stderr=complaints
            )
            try:
                for line in self._lines(process, reading, indices):
                    reading.take(line)
                process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            complaints.seek(0)
            reading.death = _death(process.returncode, complaints.read().decode(errors="replace"))
        return _renumbered(reading, indices)

    def _lines(self, process: subprocess.Popen[bytes], reading: _Reading, indices: list[int]) -> Iterator[str]:
        """Whole lines as they come; what stands behind the last line's end was torn by the reader's death."""
        assert process.stdout is not None
        descriptor, rest = process.stdout.fileno(), b""
        while True:
            if not select.select([descriptor], [], [], TIMEOUT_S)[0]:
                names = ", ".join(self._files[indices[at]] for at in reading.unanswered()) or "the first file"
                raise DataError(f"{names}: not read within {TIMEOUT_S:.0f} s.", "Check the disk or the store.")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode() for line in whole)


def _renumbered(reading: _Reading, indices: list[int]) -> _Reading:
    """A reader counts its own files; here they have the numbers of the whole list."""
    reading.answers = {indices[at]: answer for at, answer in reading.answers.items()}
    reading.begun = [indices[at] for at in reading.begun]
    return reading


def _death(returncode: int, complaints: str) -> str:
    if returncode < 0:
        return f"its reader died of {signal.Signals(-returncode).name}"
    return f"its reader ended with {returncode}: {last_line(complaints)}"
