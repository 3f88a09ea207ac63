"""The zip archives that torch.save writes: stored records under one name, the directory last, nothing else.

Python and torch look for a zip's directory in their own ways. Only an archive that reads the same in both is opened,
and none that declares more than the file holds.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from typing import BinaryIO

from keepstep.checkpoint.files import size_of

MAX_DIRECTORY_BYTES = 32 * 1024**2
_END, _END_64, _LOCATOR_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_LOCAL_HEADER_BYTES = 30
_READ_BYTES = 1024**2
_RECORD = re.compile(
    r"(data\.pkl|byteorder|version|\.format_version|\.storage_alignment|data/\d{1,9}|\.data/serialization_id)"
)

PICKLE = "data.pkl"


class ArchiveError(ValueError):
    """The file is not an archive of torch.save; the message says why."""


class TorchZip:
    """Records of one archive by their name below the archive's own: `data.pkl`, `data/<key>`, …"""

    def __init__(self, file: BinaryIO) -> None:
        """
        Raises:
            ArchiveError: torn, compressed, encrypted, with records that torch.save does not write, or that overlap.
        """
        try:
            directory_begin, num_entries = _check_end(file)
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
            if len(infos) != num_entries:
                raise ArchiveError(f"a directory of {len(infos)} records, the end record says {num_entries}")
            self._infos = _records(infos, directory_begin)
            self.name = next(iter(self._infos.values())).filename.partition("/")[0]
        except ArchiveError:
            raise
        except _TORN as error:
            raise ArchiveError(f"not a whole torch archive ({error})") from error

    def size(self, record: str) -> int | None:
        """Bytes of a record, None when it is not there."""
        return self._infos[record].file_size if record in self._infos else None

    def storages(self) -> set[str]:
        """Keys of the records that hold tensors' bytes."""
        return {name.removeprefix("data/") for name in self._infos if name.startswith("data/")}

    def read(self, record: str, offset: int, num_bytes: int) -> bytes:
        """Part of a record.

        Raises:
            ArchiveError: the record's own header is torn, or its checksum differs where it was read to its end.
        """
        try:
            with self._zip.open(self._infos[record]) as file:
                file.seek(offset)
                return file.read(num_bytes)
        except _TORN as error:
            raise ArchiveError(f"not a whole torch archive ({error})") from error

    def check_sums(self) -> None:
        """Read every record and compare it with the CRC-32 that torch.save noted beside it. Constant memory.

        Raises:
            ArchiveError: one differs.
        """
        for name, info in self._infos.items():
            try:
                with self._zip.open(info) as file:
                    while file.read(_READ_BYTES):
                        pass
            except _TORN as error:
                raise ArchiveError(f"record {name} is damaged ({error})") from error


_TORN = (
    zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, OverflowError, RuntimeError, struct.error,
    zlib.error, KeyError,
)  # fmt: skip


def _check_end(file: BinaryIO) -> tuple[int, int]:
    """(where the directory begins, its number of entries). It ends at the end record, which ends the file."""
    fd, size = file.fileno(), size_of(file)
    end_at = size - _END.size
    if end_at < 0:
        raise ArchiveError(f"not a whole torch archive ({size} bytes)")
    sign, *numbers, comment_bytes = _END.unpack(os.pread(fd, _END.size, end_at))
    if sign != b"PK\5\6" or comment_bytes:
        raise ArchiveError("not a whole torch archive (no end record at the file's end)")
    locator_at = end_at - _LOCATOR_64.size
    locator = os.pread(fd, _LOCATOR_64.size, locator_at) if locator_at >= 0 else b""
    if locator[:4] == b"PK\6\7":
        end_at = _LOCATOR_64.unpack(locator)[2]
        if end_at + _END_64.size != locator_at:
            raise ArchiveError("not a whole torch archive (its end records do not follow each other)")
        *_, first_disk, this_disk, here, total, directory_bytes, begin = _END_64.unpack(
            os.pread(fd, _END_64.size, end_at)
        )
        wide = [first_disk, this_disk, here, total, directory_bytes, begin]
        most = [0xFFFF] * 4 + [0xFFFFFFFF] * 2
        # A reader believes the wide record or the narrow one: they must say the same.
        if any(narrow not in (value, limit) for narrow, value, limit in zip(numbers, wide, most, strict=True)):
            raise ArchiveError("not a whole torch archive (its end records disagree)")
        numbers = wide
    first_disk, this_disk, here, total, directory_bytes, begin = numbers
    if first_disk or this_disk or here != total:
        raise ArchiveError("not a whole torch archive (one of several disks)")
    if begin + directory_bytes != end_at:
        raise ArchiveError("not a whole torch archive (the directory is not where the end record says)")
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise ArchiveError(f"a directory of {directory_bytes} bytes, at most {MAX_DIRECTORY_BYTES} are read")
    return begin, total


def _records(infos: list[zipfile.ZipInfo], directory_begin: int) -> dict[str, zipfile.ZipInfo]:
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ArchiveError("the archive is compressed, which torch.save never does")
    if any(info.flag_bits & 1 for info in infos):
        raise ArchiveError("the archive is encrypted, which torch.save never does")
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        prefix, _, record = info.filename.partition("/")
        if not _RECORD.fullmatch(record) or prefix != infos[0].filename.partition("/")[0]:
            raise ArchiveError(f"record {info.filename!r}, which torch.save does not write")
        if record in found:
            raise ArchiveError(f"two records {record}")
        found[record] = info
    _check_room(infos, directory_begin)
    if PICKLE not in found:
        raise ArchiveError(f"no record {PICKLE}")
    return found


def _check_room(infos: list[zipfile.ZipInfo], directory_begin: int) -> None:
    """Records lie behind each other, before the directory: none shares bytes, none declares more than there are."""
    ordered = sorted(infos, key=lambda info: info.header_offset)
    ends = [info.header_offset for info in ordered[1:]] + [directory_begin]
    for info, end in zip(ordered, ends, strict=True):
        if info.compress_size != info.file_size:
            raise ArchiveError(f"record {info.filename} declares two sizes")
        if info.header_offset + _LOCAL_HEADER_BYTES + info.file_size > end:
            raise ArchiveError(f"record {info.filename} declares {info.file_size} bytes, which the file does not have")
