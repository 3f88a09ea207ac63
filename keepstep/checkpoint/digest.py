"""Digests by parts: SHA-256 of consecutive parts and a tree over them.

The part size is the part size of a multipart upload, so that the tree equals S3's composite SHA-256 checksum and one
HEAD request verifies an object of any size.
"""

from __future__ import annotations

import base64
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

SMALLEST_PART_BYTES = 16 * 1024**2
MOST_PARTS = 9000
READ_BYTES = 1024**2


@dataclass(frozen=True)
class FileDigest:
    """Identity of a file's content.

    parts: hex SHA-256 of consecutive parts of `part_size` bytes; the last may be shorter; an empty file has one.
    tree: base64 of SHA-256 over the raw part digests followed by `-<count>`; one part: base64 of its own digest.
    """

    size: int
    part_size: int
    parts: list[str]
    tree: str

    @classmethod
    def from_parts(cls, size: int, part_size: int, parts: list[str]) -> FileDigest:
        return cls(size, part_size, parts, tree_of(parts))

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> FileDigest:
        return cls(record["size"], record["part_size"], list(record["parts"]), record["tree"])

    def to_record(self) -> dict[str, Any]:
        return {"size": self.size, "part_size": self.part_size, "parts": self.parts, "tree": self.tree}


def part_size_for(size_bytes: int) -> int:
    """16 MiB, doubled until there are at most 9,000 parts (S3 takes 10,000)."""
    part_size = SMALLEST_PART_BYTES
    while num_parts(size_bytes, part_size) > MOST_PARTS:
        part_size *= 2
    return part_size


def num_parts(size_bytes: int, part_size: int) -> int:
    return max(1, -(-size_bytes // part_size))


def tree_of(parts: list[str]) -> str:
    """S3's checksum of an object uploaded in these parts."""
    raw = [bytes.fromhex(part) for part in parts]
    if len(raw) == 1:
        return base64.b64encode(raw[0]).decode()
    return f"{base64.b64encode(hashlib.sha256(b''.join(raw)).digest()).decode()}-{len(raw)}"


def digest_file(path: Path) -> FileDigest:
    """Digest of a file, its parts hashed side by side in constant memory."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        part_size = part_size_for(size)
        return FileDigest.from_parts(size, part_size, digest_parts(file.fileno(), size, part_size))


def digest_parts(fd: int, size: int, part_size: int) -> list[str]:
    """Hex SHA-256 of every part of an open file. hashlib releases the interpreter lock, so threads are enough."""
    count = num_parts(size, part_size)
    offsets = [index * part_size for index in range(count)]
    if count == 1:
        return [_digest_range(fd, 0, size)]
    with ThreadPoolExecutor(min(count, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda offset: _digest_range(fd, offset, min(part_size, size - offset)), offsets))


class HashingWriter:
    """A binary file that hashes what is written to it. Sequential writes only, which is what torch.save does."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self._parts: list[str] = []
        self._hash = hashlib.sha256()
        self._room = SMALLEST_PART_BYTES

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        written = len(view)
        self._size += written
        while len(view) >= self._room:
            self._hash.update(view[: self._room])
            view = view[self._room :]
            self._parts.append(self._hash.hexdigest())
            self._hash, self._room = hashlib.sha256(), SMALLEST_PART_BYTES
        self._hash.update(view)
        self._room -= len(view)
        return written

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> FileDigest:
        """Digest of everything written so far; the file may be closed by now."""
        part_size = part_size_for(self._size)
        if part_size != SMALLEST_PART_BYTES:
            # Only known at the end: files over 140 GiB are hashed once more with their larger parts.
            return digest_file(Path(self._file.name))
        unfinished = self._room < SMALLEST_PART_BYTES or not self._parts
        parts = self._parts + ([self._hash.hexdigest()] if unfinished else [])
        return FileDigest.from_parts(self._size, part_size, parts)


def _digest_range(fd: int, offset: int, length: int) -> str:
    digest = hashlib.sha256()
    end = offset + length
    # One buffer for all reads: a new one each time costs page faults, a tenth of the whole.
    buffer = memoryview(bytearray(min(READ_BYTES, length)))
    while offset < end:
        num_read = os.preadv(fd, [buffer[: end - offset]], offset)
        if not num_read:
            break
        digest.update(buffer[:num_read])
        offset += num_read
    return digest.hexdigest()
