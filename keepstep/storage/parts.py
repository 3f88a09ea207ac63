"""Parts of local files against their manifest."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from keepstep.checkpoint.digest import FileDigest
from keepstep.storage.protocol import LocalFileError

_REMEDY = "The file changed after it was saved: the disk is failing or somebody edited it. `keepstep verify` says more."
_READ_BYTES = 1 << 20


def part_span(digest: FileDigest, number: int) -> tuple[int, int]:
    """(offset, length) of a part in bytes."""
    start = number * digest.part_size
    return start, min(digest.part_size, digest.size - start)


def check_size(path: Path, digest: FileDigest) -> None:
    """
    Raises:
        LocalFileError: the file is missing or has another size than its manifest says.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise LocalFileError(f"{path} cannot be read: {error.strerror}.", _REMEDY) from error
    if size != digest.size:
        raise LocalFileError(f"{path} has {size} bytes, its manifest says {digest.size}.", _REMEDY)


def open_part(path: Path, digest: FileDigest, number: int) -> FilePart:
    """A part, after its bytes were compared with the manifest.

    Raises:
        LocalFileError: it cannot be read or differs.
    """
    try:
        part = FilePart(path, *part_span(digest, number))
    except OSError as error:
        raise LocalFileError(f"{path} cannot be read: {error.strerror}.", _REMEDY) from error
    try:
        found = part.sha256()
        if found != digest.parts[number]:
            raise LocalFileError(
                f"{path}: part {number} has SHA-256 {found[:12]}…, its manifest says {digest.parts[number][:12]}….",
                _REMEDY,
            )
    except BaseException:
        part.close()
        raise
    return part


def holds_part(path: Path, digest: FileDigest, number: int, etag: str | None = None) -> bool:
    """Whether the file holds this part of the manifest already, and, if asked, whether its MD5 is `etag`."""
    start, length = part_span(digest, number)
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start + length:
            return False
        file.seek(start)
        while length and (data := file.read(min(_READ_BYTES, length))):
            length -= len(data)
            sha256.update(data)
            if etag is not None:
                md5.update(data)
    return sha256.hexdigest() == digest.parts[number] and etag in (None, md5.hexdigest(), f'"{md5.hexdigest()}"')


class FilePart(io.RawIOBase):
    """A part of a local file, read as a file of its own. `len()` is its length in bytes, none of which is kept here.

    Raises:
        LocalFileError: while reading: the file cannot be read or was cut.
    """

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._start, self._length, self._position = start, length, 0
        self._path = path
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        try:
            count = os.preadv(self._file.fileno(), [view], self._start + self._position)
        except OSError as error:
            raise LocalFileError(f"{self._path} cannot be read: {error.strerror}.", _REMEDY) from error
        if view and not count:
            raise LocalFileError(f"{self._path} ends before its manifest says.", _REMEDY)
        self._position += count
        return count

    def sha256(self) -> str:
        """Hex SHA-256 of the whole part."""
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(_READ_BYTES, max(1, self._length))))
        self.seek(0)
        while count := self.readinto(buffer):
            found.update(buffer[:count])
        return found.hexdigest()

    def close(self) -> None:
        # The destructor also closes what could not be opened.
        if hasattr(self, "_file"):
            self._file.close()
        super().close()


class PartSink:
    """Takes a part's bytes in order: hashes them and writes them to their place in an open file.

    Args:
        handle: the open file; None: only hashed.
    """

    def __init__(self, handle: int | None, offset: int) -> None:
        self._handle, self._offset = handle, offset
        self._hash = hashlib.sha256()

    def take(self, block: bytes | memoryview) -> None:
        self._hash.update(block)
        view = memoryview(block)
        while self._handle is not None and view:
            written = os.pwrite(self._handle, view, self._offset)
            view, self._offset = view[written:], self._offset + written

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
