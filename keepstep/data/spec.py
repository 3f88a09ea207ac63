"""From what `data.train_files` says to the files themselves, and how one of them is opened."""

from __future__ import annotations

import difflib
import glob
import os
import stat
from collections.abc import Sequence
from typing import IO, Any

from keepstep.data import trouble
from keepstep.errors import DataError
from keepstep.quickstart.make import PREFIX as MADE_PREFIX
from keepstep.quickstart.make import made_path
from keepstep.run import RunDir

S3_PREFIX = "s3://"
_MAX_NAMED = 5


def resolve_files(patterns: str | Sequence[str], run: RunDir) -> list[str]:
    """Absolute paths and `s3://` addresses in the order given, each glob's in order of name.

    Raises:
        DataError: a path does not exist, is a folder, or a glob finds nothing.
    """
    return [
        file for pattern in ([patterns] if isinstance(patterns, str) else patterns) for file in _resolve(pattern, run)
    ]


def is_remote(path: str) -> bool:
    return path.startswith(S3_PREFIX)


def open_file(path: str, block_size: int | None = None) -> IO[bytes]:
    """Open a file here or in a store; credentials and endpoint come from the standard AWS chain.

    Args:
        block_size: bytes that are fetched from a store at once, at least; None: for reading it whole.
    """
    if not is_remote(path):
        return open(path, "rb")
    return _store().open(path, "rb", **({"block_size": block_size} if block_size else {}))


def _resolve(pattern: str, run: RunDir) -> list[str]:
    if is_remote(pattern):
        return _resolve_remote(pattern)
    path = str(made_path(pattern, run)) if pattern.startswith(MADE_PREFIX) else os.path.expanduser(pattern)
    path = os.path.abspath(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        if os.path.islink(path) or not glob.has_magic(path):
            raise DataError(f"{path} {trouble.unreadable(path, error)}.", _near(path)) from error
        return _resolve_glob(path)
    except OSError as error:
        raise DataError(f"{path} {trouble.unreadable(path, error)}.", "Check its name and its permissions.") from error
    if stat.S_ISREG(mode):
        return [path]
    if stat.S_ISDIR(mode):
        raise DataError(f"{path} is a folder.", f"Name its files: {os.path.join(path, '*.parquet')}")
    raise DataError(f"{path} is not a regular file.", "Name a parquet file.")


def _resolve_glob(path: str) -> list[str]:
    """Dangling links stay in: a shard that is silently left out makes another data set."""
    found = sorted(file for file in glob.glob(path, recursive=True) if not os.path.isdir(file))
    if not found:
        raise DataError(f"{path}: no file has such a name.", _near(path))
    return found


def _near(path: str) -> str:
    """The way out of a name that is not there: what the nearest folder holds that looks like it."""
    folder, name = os.path.split(path)
    while not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    try:
        there = sorted(entry for entry in os.listdir(folder) if not entry.startswith("."))
    except PermissionError:
        return f"Check the name: {folder} cannot be listed."
    few = ", ".join(difflib.get_close_matches(name, there, n=3)) or ", ".join(there[:_MAX_NAMED]) or "nothing"
    return f"Check the name: {folder} has {few}{', …' if len(there) > _MAX_NAMED else ''}."


def _resolve_remote(pattern: str) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    try:
        found = sorted(_store().glob(pattern))
    except Exception as error:  # the store's libraries raise errors of many families
        raise DataError(
            f"{pattern} {trouble.refused_by_store(error)}.", "Check the address and the credentials."
        ) from error
    if not found:
        raise DataError(f"{pattern}: no object has such a name.", "Check the address.")
    return [S3_PREFIX + name for name in found]


def _store() -> Any:
    import s3fs

    return s3fs.S3FileSystem()
