"""SHA-256 of a table's rows, whatever files, row groups, pages, compression and encodings they are cut into.

The canonical form is one stream of bytes per leaf of the schema and kind, each hashed by itself, so that a batch can be
fed as it comes and nothing depends on where it ends:

    valid     one byte a slot: 1 a value, 0 null
    length    int64 of every list, string or binary that is not null
    value     the values that are not null, one after the other: little-endian, UTF-8, or the bytes; a boolean is a
              byte; every NaN is the same NaN, and -0.0 is not 0.0

A struct hands its nulls down to its fields; a map is a list of its keys and values. Dictionaries are decoded, and the
large, view and fixed-size variants of a type are that type. The digest is the SHA-256 of the JSON list of all streams
(path, type, kind, digest), sorted, with the ranges of rows in which each column is there: the order of columns does
not count, that of rows does.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

Path = tuple[str, ...]


class RowDigest:
    """Fed with batches in the order of the rows; holds one hash per stream, no rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._streams: dict[Path, Any] = {}
        self._ranges: dict[Path, list[list[int]]] = {}

    def update(self, batch: Any) -> None:
        """Take in a pyarrow RecordBatch."""
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            column = (name, canonical_type(array.type))
            self._extend(column, len(array))
            self._feed(column, array)
        self.num_rows += batch.num_rows

    def hexdigest(self) -> str:
        streams = sorted([*path, stream.hexdigest()] for path, stream in self._streams.items())
        ranges = sorted([*column, found] for column, found in self._ranges.items())
        whole = json.dumps({"rows": self.num_rows, "columns": ranges, "streams": streams}, separators=(",", ":"))
        return hashlib.sha256(whole.encode()).hexdigest()

    def _extend(self, column: Path, count: int) -> None:
        ranges = self._ranges.setdefault(column, [])
        if ranges and ranges[-1][1] == self.num_rows:
            ranges[-1][1] += count
        elif count:
            ranges.append([self.num_rows, self.num_rows + count])

    def _feed(self, path: Path, array: Any) -> None:
        import pyarrow
        import pyarrow.compute as compute

        types = pyarrow.types
        array = _plain(array)
        self._hash((*path, "valid"), _fixed_width_bytes(compute.is_valid(array).cast(pyarrow.uint8())))
        kind = array.type
        if types.is_struct(kind):
            for field, child in zip(kind, array.flatten(), strict=True):
                self._feed((*path, field.name), child)
            return
        values = array.drop_null() if array.null_count else array
        if _is_list(kind):
            self._hash((*path, "length"), _fixed_width_bytes(compute.list_value_length(values).cast(pyarrow.int64())))
            self._feed((*path, "[]"), values.flatten())
        elif _is_binary(kind):
            self._hash((*path, "length"), _fixed_width_bytes(compute.binary_length(values).cast(pyarrow.int64())))
            self._hash((*path, "value"), _binary_bytes(values))
        elif not types.is_null(kind):
            self._hash((*path, "value"), _fixed_width_bytes(values))

    def _hash(self, path: Path, content: Any) -> None:
        self._streams.setdefault(path, hashlib.sha256()).update(content)


def canonical_type(kind: Any) -> str:
    """A pyarrow type without what does not change its values."""
    import pyarrow

    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType):
        return canonical_type(kind.storage_type)
    if types.is_dictionary(kind):
        return canonical_type(kind.value_type)
    if types.is_struct(kind):
        return "struct<" + ",".join(sorted(f"{field.name}:{canonical_type(field.type)}" for field in kind)) + ">"
    if types.is_map(kind):
        return f"map<{canonical_type(kind.key_type)},{canonical_type(kind.item_type)}>"
    if _is_list(kind):
        return f"list<{canonical_type(kind.value_type)}>"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    return "binary" if _is_binary(kind) else str(kind)


def _plain(array: Any) -> Any:
    """The same values in a type that has one layout."""
    import pyarrow
    import pyarrow.compute as compute

    types = pyarrow.types
    if isinstance(array, pyarrow.ExtensionArray):
        array = array.storage
    kind = array.type
    if types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if types.is_map(kind):
        entry = pyarrow.struct([pyarrow.field("key", kind.key_type, nullable=False), ("value", kind.item_type)])
        return array.cast(pyarrow.list_(entry))
    if types.is_boolean(kind):
        return array.cast(pyarrow.uint8())
    if _is_binary(kind):
        return array.cast(pyarrow.large_binary())
    if types.is_float16(kind):
        array = array.cast(pyarrow.float32())
    if types.is_floating(array.type):
        return compute.if_else(compute.is_nan(array), pyarrow.scalar(float("nan"), array.type), array)
    return array


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _fixed_width_bytes(array: Any) -> Any:
    """The values' memory; `array` has no nulls."""
    width = array.type.bit_width // 8
    buffer = array.buffers()[1]
    return b"" if buffer is None else memoryview(buffer)[array.offset * width : (array.offset + len(array)) * width]


def _binary_bytes(array: Any) -> Any:
    """The content of all values, of a large_binary array without nulls."""
    _, offsets, content = array.buffers()
    if content is None or len(array) == 0:
        return b""
    ends = memoryview(offsets).cast("q")[array.offset : array.offset + len(array) + 1]
    return memoryview(content)[ends[0] : ends[-1]]
