"""What Keepstep asks of an object store. A store is rooted at one run's prefix: keys are relative to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint.digest import FileDigest
from keepstep.errors import NEVER, StorageError

OnBytes = Callable[[int], None]
"""Told after each part how many bytes are done, whether they went over the wire or were there already."""


def ignore_bytes(_num_bytes: int) -> None: ...


class LocalFileError(StorageError):
    """A local file is not what its manifest says: it was damaged after it was saved. Nothing was uploaded of it."""

    failure_class = "local_file_differs"
    budget = NEVER


class DamagedObjectError(StorageError):
    """An object's content is not what its manifest says: asking again gives the same."""

    failure_class = "object_damaged"
    budget = NEVER


@dataclass(frozen=True)
class ObjectInfo:
    """What the store says of an object.

    checksum_sha256: base64 of SHA-256 over the content, or for several parts over the raw part digests
        followed by `-<count>` (S3's composite form); None when the store keeps none.
    """

    size: int
    checksum_sha256: str | None


class ObjectStore(Protocol):
    """Every method raises `StorageRefusedError` when the store says no, `StorageError` for everything that may pass."""

    @property
    def where(self) -> str:
        """The root as a person writes it: `s3://bucket/prefix`."""
        ...

    def put_file(self, path: Path, key: str, digest: FileDigest, on_bytes: OnBytes = ignore_bytes) -> None:
        """Upload a file under a free key and confirm it. On return the object has exactly the content of `digest`.

        Parts that an interrupted upload of the same content left on the server are not sent again.

        Raises:
            LocalFileError: the file differs from `digest`; no object is made.
            StorageError: also when another object stands there already: it is not replaced.
        """
        ...

    def get_file(self, key: str, path: Path, digest: FileDigest, on_bytes: OnBytes = ignore_bytes) -> None:
        """Download into a file, compared with `digest` part by part, fsynced. Parts that it holds are not fetched.

        Raises:
            DamagedObjectError: the object is missing or differs; the file is then incomplete.
            NoRoomError: the filesystem is full.
        """
        ...

    def put_bytes(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        """Store small content. With `if_absent`, False and nothing changed when the key exists."""
        ...

    def get_bytes(self, key: str) -> bytes | None:
        """Content of a small object, None when there is none."""
        ...

    def head(self, key: str) -> ObjectInfo | None: ...

    def confirms(self, key: str, digest: FileDigest) -> bool:
        """Whether the object exists with exactly this content, on evidence that the store cannot merely echo."""
        ...

    def list_objects(self, prefix: str) -> list[tuple[str, int]]:
        """(key, size in bytes) of every object under `prefix`, in key order."""
        ...

    def delete(self, key: str) -> None: ...

    def abort_unfinished(self, prefix: str, keep: Callable[[str], bool] = lambda key: False) -> int:
        """Abort unfinished uploads under `prefix`, of whoever began them, except of keys to `keep`; how many."""
        ...

    def close(self) -> None: ...
