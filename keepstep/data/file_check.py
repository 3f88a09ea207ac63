"""One parquet file, looked at: rows, size, columns and digest of its footer, or the sentence that says what is wrong.

Used in the reader's process only: a corrupt file can end the process that looks at it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import IO, Any

from keepstep.data import trouble
from keepstep.data.count import FileRecord
from keepstep.data.spec import is_remote, open_file
from keepstep.errors import first_line

MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_END_BYTES = 8
"""Length of the footer, 4 bytes, and the magic."""
_GUESS_BYTES = 64 * 1024
"""Read from the end at once: most footers are smaller."""
_BATCH_ROWS = 4096
_BUFFER_BYTES = 1024**2

OnBatch = Callable[[Any], None]


class FileProblem(Exception):  # noqa: N818  (a finding, not a failure of the check)
    """What is wrong with a file; completes "<path> …"."""


def inspect(path: str, columns: Sequence[str], on_batch: OnBatch | None) -> FileRecord:
    """Look at one file.

    Args:
        columns: which it must have.
        on_batch: read every page as well, and call this with each batch of rows; None: the footer alone.

    Raises:
        FileProblem: with what is wrong.
    """
    if is_remote(path):
        try:
            return _inspect_open(path, columns, on_batch, None)
        except FileProblem:
            raise
        except Exception as error:  # the store's libraries raise errors of many families
            raise FileProblem(trouble.refused_by_store(error)) from error
    try:
        before = os.stat(path)
        if (problem := trouble.unfinished_name(path)) is not None:
            raise FileProblem(problem)
        found = _inspect_open(path, columns, on_batch, trouble.age_s(path))
        after = os.stat(path)
    except OSError as error:
        raise FileProblem(trouble.unreadable(path, error)) from error
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise FileProblem(
            f"is still being written: it changed while it was read ({before.st_size} bytes, then {after.st_size}). "
            "Wait until its writer has closed it"
        )
    return found


def _inspect_open(path: str, columns: Sequence[str], on_batch: OnBatch | None, age_s: float | None) -> FileRecord:
    import pyarrow

    with open_file(path, block_size=None if on_batch else _GUESS_BYTES) as file:
        size = file.seek(0, os.SEEK_END)
        footer = _footer(path, file, size, age_s)
        try:
            rows, found = _parse(footer)
            if on_batch:
                _read_pages(file, on_batch)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise FileProblem(f"is damaged: {first_line(error)}" + trouble.cache_note(path)) from error
    names = [name for name, _ in found]
    if missing := [column for column in columns if column not in names]:
        raise FileProblem(f"has no column {missing[0]}; it has {', '.join(names)}")
    return FileRecord(path, rows, size, hashlib.sha256(footer).hexdigest(), found)


def _footer(path: str, file: IO[bytes], size: int, age_s: float | None) -> bytes:
    """Footer with its length and magic (Parquet format: a file ends with metadata, 4-byte length, "PAR1")."""
    if size == 0:
        raise FileProblem("is 0 bytes: nothing was written into it" + trouble.cache_note(path))
    file.seek(max(0, size - _GUESS_BYTES))
    end = file.read(_GUESS_BYTES)
    head = end if len(end) == size else _at(file, 0, len(MAGIC))
    if head[: len(MAGIC)] == ENCRYPTED_MAGIC:
        raise FileProblem("is encrypted parquet, which cannot be read")
    if head[: len(MAGIC)] != MAGIC:
        raise FileProblem(f"is not parquet: it does not begin with {MAGIC.decode()}")
    if size < len(MAGIC) + _END_BYTES or not end.endswith(MAGIC):
        raise FileProblem(trouble.truncated(path, size, age_s))
    length = int.from_bytes(end[-_END_BYTES:-4], "little")
    if length + _END_BYTES + len(MAGIC) > size:
        raise FileProblem(
            f"is damaged: its footer of {length} bytes is larger than the file of {size}" + trouble.cache_note(path)
        )
    length += _END_BYTES
    return end[-length:] if length <= len(end) else _at(file, size - length, length)


def _at(file: IO[bytes], position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


def _parse(footer: bytes) -> tuple[int, tuple[tuple[str, str], ...]]:
    """(rows, columns with their types) of a footer; the file itself is not touched again."""
    import pyarrow
    import pyarrow.parquet

    metadata = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(MAGIC + footer)).metadata
    in_groups = sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if in_groups != metadata.num_rows:
        raise ValueError(f"its footer names {metadata.num_rows} rows, its row groups have {in_groups}")
    schema = metadata.schema.to_arrow_schema()
    return int(metadata.num_rows), tuple((field.name, str(field.type)) for field in schema)


def _read_pages(file: IO[bytes], on_batch: OnBatch) -> None:
    """Every page, with its CRC where one was written; memory is bounded by a batch and a buffer per column."""
    import pyarrow.parquet

    file.seek(0)
    parquet = pyarrow.parquet.ParquetFile(
        file, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER_BYTES
    )
    num_read = 0
    for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
        batch.validate(full=True)
        on_batch(batch)
        num_read += batch.num_rows
    if num_read != parquet.metadata.num_rows:
        raise ValueError(f"its pages hold {num_read} rows, its footer names {parquet.metadata.num_rows}")
