"""Names, dtypes, shapes and places of the tensors in a safetensors file, read without safetensors and without torch.

A file is 8 bytes of header length, the header (JSON), then the tensors' bytes, which the header's offsets must cover
without gap or overlap. torch.distributed.checkpoint notes under `__metadata__` where a shard lies in its full tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from keepstep.checkpoint import strict_json
from keepstep.checkpoint.files import size_of
from keepstep.checkpoint.tensor_headers import MAX_COUNT, MAX_DIMENSIONS, HeaderError, TensorInfo

DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
METADATA, SHARDING, OFFSETS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class Shard:
    """One tensor of the file: a full one, or the part of one that begins at `begins` (an index per dimension)."""

    dtype: str
    shape: tuple[int, ...]
    begins: tuple[int, ...]
    file_offset: int
    """Bytes from the file's begin."""


class SafetensorsFile:
    """The header of one file."""

    def __init__(self, file: BinaryIO) -> None:
        """
        Raises:
            HeaderError: torn, or the header does not fit the file.
        """
        self._fd = file.fileno()
        header, data_begin = _read_header(self._fd, size_of(file))
        metadata = header.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise HeaderError(f"{METADATA} is not text by name")
        begins = _sharding(metadata)
        if begins is not None and begins.keys() != header.keys():
            raise HeaderError(f"{SHARDING} names {len(begins)} tensors, the header {len(header)}")
        self.shards: dict[str, Shard] = {}
        end = 0
        # A tensor without elements begins where the next one does, and comes before it.
        for name, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
            shard, entry_end = _shard(name, entry, end, data_begin, begins)
            self.shards[name] = shard
            end = entry_end
        if data_begin + end != size_of(file):
            raise HeaderError(f"the tensors end at byte {data_begin + end}, the file at {size_of(file)}")

    def describe(self) -> TensorInfo:
        """[[name, dtype, shape], …] in the manifest's form."""
        return [[name, shard.dtype, list(shard.shape)] for name, shard in self.shards.items()]

    def scalar(self, name: str) -> float:
        """Value of a float32 or float64 tensor of one element.

        Raises:
            HeaderError: it is no such tensor.
        """
        shard = self.shards[name]
        code, size = {"float32": ("<f", 4), "float64": ("<d", 8)}.get(shard.dtype, ("", 0))
        if not code or math.prod(shard.shape) != 1:
            raise HeaderError(f"{name} is {shard.dtype} {list(shard.shape)}, expected one number")
        try:
            return float(struct.unpack(code, os.pread(self._fd, size, shard.file_offset))[0])
        except (OSError, struct.error) as error:
            raise HeaderError(f"{name} cannot be read ({error})") from error


def _read_header(fd: int, size: int) -> tuple[dict[str, Any], int]:
    """(header, where the tensors' bytes begin)."""
    try:
        first = os.pread(fd, 8, 0)
        num_bytes = struct.unpack("<Q", first)[0]
        if num_bytes > min(size - 8, strict_json.MAX_BYTES):
            raise HeaderError(f"a header of {num_bytes} bytes in a file of {size}")
        header = strict_json.loads(os.pread(fd, num_bytes, 8))
    except (OSError, struct.error, strict_json.StrictJsonError) as error:
        raise HeaderError(f"not a whole safetensors file ({error})") from error
    if not isinstance(header, dict):
        raise HeaderError("the header is not an object")
    return header, 8 + num_bytes


def _sharding(metadata: dict[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Where each shard begins in its full tensor; None: the file holds full tensors."""
    if SHARDING not in metadata:
        return None
    try:
        found = strict_json.loads(metadata[SHARDING].encode("utf-8", "surrogatepass"))
        begins = {name: tuple(entry[OFFSETS]) for name, entry in found.items()}
    except (strict_json.StrictJsonError, AttributeError, KeyError, TypeError) as error:
        raise HeaderError(f"{SHARDING} is not offsets by name") from error
    if not all(_are_counts(offsets) for offsets in begins.values()):
        raise HeaderError(f"{SHARDING} holds what is no offset")
    return begins


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise HeaderError(f"tensor {name} has no data_offsets")
    return offsets[0], offsets[1]


def _shard(
    name: str, entry: dict[str, Any], expected_begin: int, data_begin: int, begins: dict[str, tuple[int, ...]] | None
) -> tuple[Shard, int]:
    """(the tensor, where its bytes end)."""
    begin, end = _offsets(name, entry)
    dtype, itemsize = DTYPES.get(json.dumps(entry.get("dtype")).strip('"'), ("", 0))
    shape = entry.get("shape")
    if not dtype or not isinstance(shape, list) or not _are_counts(shape):
        raise HeaderError(f"tensor {name} has no known dtype, or no shape")
    if begin != expected_begin:
        raise HeaderError(f"tensor {name} begins at byte {begin}, expected {expected_begin}")
    if end - begin != math.prod(shape) * itemsize:
        raise HeaderError(f"tensor {name} has {end - begin} bytes, expected {math.prod(shape) * itemsize}")
    where = begins[name] if begins is not None else (0,) * len(shape)
    if len(where) != len(shape):
        raise HeaderError(f"tensor {name} has {len(shape)} dimensions and {len(where)} offsets")
    return Shard(dtype, tuple(shape), where, data_begin + begin), end


def _are_counts(values: Any) -> bool:
    return len(values) <= MAX_DIMENSIONS and all(type(value) is int and 0 <= value < MAX_COUNT for value in values)
