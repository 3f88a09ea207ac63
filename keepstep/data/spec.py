"""From what `data.train_files` says to the files themselves, and how one of them is opened."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import IO, Any

from keepstep.errors import DataError
from keepstep.quickstart.make import PREFIX as MADE_PREFIX
from keepstep.quickstart.make import made_path
from keepstep.run import RunDir

S3_PREFIX = "s3://"


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


def open_file(path: str) -> IO[bytes]:
    """Open a file here or in a store; credentials and endpoint come from the standard AWS chain."""
    return _store().open(path, "rb") if is_remote(path) else open(path, "rb")


def _resolve(pattern: str, run: RunDir) -> list[str]:
    if is_remote(pattern):
        return _resolve_remote(pattern)
    path = str(made_path(pattern, run)) if pattern.startswith(MADE_PREFIX) else os.path.expanduser(pattern)
    path = os.path.abspath(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder.", f"Name its files: {os.path.join(path, '*.parquet')}")
    if glob.has_magic(path):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if found:
            return found
        raise DataError(f"{path}: no file has such a name.", "Check data.train_files and data.val_files.")
    raise DataError(f"{path} does not exist.", "Check data.train_files and data.val_files.")


def _resolve_remote(pattern: str) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    try:
        found = sorted(_store().glob(pattern))
    except Exception as error:
        raise DataError(f"{pattern} cannot be listed: {error}", "Check the address and the AWS credentials.") from error
    if not found:
        raise DataError(f"{pattern}: no object has such a name.", "Check data.train_files and data.val_files.")
    return [S3_PREFIX + name for name in found]


def _store() -> Any:
    import s3fs

    return s3fs.S3FileSystem()
