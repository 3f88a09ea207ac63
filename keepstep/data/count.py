"""Rows of parquet files, from their footers, counted in a process of its own: a corrupt file can kill its reader.

python -m keepstep.data.count [--full] < request.json     one JSON object a line, in the order of the files
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from keepstep.data.spec import open_file
from keepstep.errors import DataError

TIMEOUT_S = 1800.0
MAGIC = b"PAR1"
_TAIL_BYTES = 8
_MAX_NAMED = 20


@dataclass(frozen=True)
class FileRecord:
    """One data file as it stands in run.json. `footer_sha256` covers the footer: schema, row groups, their places."""

    path: str
    rows: int
    bytes: int
    footer_sha256: str

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def count_rows(files: Sequence[str], *, columns: Sequence[str] = (), full: bool = False) -> list[FileRecord]:
    """Rows, size and footer digest of each file.

    Args:
        columns: which every file must have.
        full: read every value as well, not the footers alone.

    Raises:
        DataError: files that are missing, empty, truncated, damaged, not parquet or without a column; all are named.
    """
    command = [sys.executable, "-m", "keepstep.data.count", *(["--full"] if full else [])]
    try:
        done = subprocess.run(
            command,
            input=json.dumps([list(files), list(columns)]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        answered = (error.stdout or b"").count(b"\n")
        raise DataError(
            f"{files[answered]}: not read within {TIMEOUT_S:.0f} s.", "Check the disk or the store."
        ) from None
    # What stands behind the last line's end was torn by the reader's death.
    answers = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    problems = [answer["problem"] for answer in answers if "problem" in answer]
    if done.returncode != 0 and len(answers) < len(files):
        problems.append(f"{files[len(answers)]}: unreadable: {_death(done)}")
    if problems:
        more = f"\n  and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise DataError(
            "The data set cannot be read:\n  " + "\n  ".join(problems[:_MAX_NAMED]) + more,
            "Fetch or write these files anew, or leave them out of data.train_files and data.val_files.",
        )
    return [FileRecord(**answer) for answer in answers]


def _death(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its reader died of {signal.Signals(-done.returncode).name}"
    return f"its reader ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"


def inspect(path: str, columns: Sequence[str], full: bool) -> dict[str, Any]:
    """FileRecord's fields, or {"problem": sentence}. In the reader's process."""
    import pyarrow

    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            problem = _shape_problem(file, size)
            if problem:
                return {"problem": f"{path} {problem}"}
            footer = _footer(file, size)
            rows, there = _read(file, full)
    except FileNotFoundError:
        return {"problem": f"{path} does not exist"}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return {"problem": f"{path} is damaged: {str(error).splitlines()[0]}"}
    if missing := [column for column in columns if column not in there]:
        return {"problem": f"{path} has no column {missing[0]}; it has {', '.join(there)}"}
    return FileRecord(path, rows, size, hashlib.sha256(footer).hexdigest()).to_record()


def _shape_problem(file: IO[bytes], size: int) -> str | None:
    if size == 0:
        return "is 0 bytes"
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        return f"is not parquet: it does not begin with {MAGIC.decode()}"
    if size < 2 * len(MAGIC) + _TAIL_BYTES // 2 or _tail(file, size)[4:] != MAGIC:
        return f"is truncated: its {size} bytes do not end with a parquet footer"
    length = int.from_bytes(_tail(file, size)[:4], "little")
    if length + _TAIL_BYTES + len(MAGIC) > size:
        return f"is damaged: its footer of {length} bytes is larger than the file of {size}"
    return None


def _tail(file: IO[bytes], size: int) -> bytes:
    file.seek(size - _TAIL_BYTES)
    return file.read(_TAIL_BYTES)


def _footer(file: IO[bytes], size: int) -> bytes:
    """Footer with its length and magic (Parquet format: file ends with metadata, 4-byte length, "PAR1")."""
    length = int.from_bytes(_tail(file, size)[:4], "little") + _TAIL_BYTES
    file.seek(size - length)
    return file.read(length)


def _read(file: IO[bytes], full: bool) -> tuple[int, list[str]]:
    """(rows, names of the columns)."""
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=full)
    if full:
        for batch in parquet.iter_batches():
            batch.validate(full=True)
    return int(parquet.metadata.num_rows), list(parquet.schema_arrow.names)


def _main() -> None:
    full = "--full" in sys.argv[1:]
    files, columns = json.load(sys.stdin)
    for path in files:
        # Flushed line by line: the first file without an answer is the one that killed its reader.
        print(json.dumps(inspect(path, columns, full)), flush=True)


if __name__ == "__main__":
    _main()
