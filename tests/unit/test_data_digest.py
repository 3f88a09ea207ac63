"""The digest of rows: values and order count, how they are cut, compressed and encoded does not."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.data.count import read_rows
from keepstep.data.row_digest import RowDigest

ROWS: list[dict[str, Any]] = [
    {
        "text": text,
        "number": number,
        "score": score,
        "raw": raw,
        "yes": yes,
        "chat": chat,
        "deep": deep,
    }
    for text, number, score, raw, yes, chat, deep in [
        ("a", 1, 0.5, b"\x00", True, [{"role": "user", "content": "1+1="}], {"x": {"y": [1, 2]}}),
        ("", None, float("nan"), b"", False, [], {"x": None}),
        (None, -5, None, None, None, None, None),
        ("äö", 2**40, -0.0, b"\xff\x00", True, [{"role": None, "content": ""}, None], {"x": {"y": None}}),
        ("b" * 300, 0, 1e300, b"xyz", None, [{"role": "s", "content": "t"}], {"x": {"y": [None, 3, None]}}),
    ]
]


def digest(*tables: pyarrow.Table | pyarrow.RecordBatch, batch_rows: int = 1000) -> str:
    found = RowDigest()
    for table in tables:
        for batch in table.to_batches(max_chunksize=batch_rows):
            found.update(batch)
    return found.hexdigest()


TABLE = pyarrow.Table.from_pylist(ROWS * 3)
WHOLE = digest(TABLE)


@pytest.mark.parametrize("batch_rows", [1, 2, 4, 7])
def test_batches_do_not_count(batch_rows: int) -> None:
    assert digest(TABLE, batch_rows=batch_rows) == WHOLE
    assert digest(TABLE.slice(0, 4), TABLE.slice(4, 0), TABLE.slice(4), batch_rows=batch_rows) == WHOLE


def test_files_row_groups_and_compression_do_not_count(tmp_path: Path) -> None:
    """As one file, and as three with other row groups, pages, compression and encodings, read through the reader."""
    one, *three = (str(tmp_path / f"{name}.parquet") for name in "abcd")
    pyarrow.parquet.write_table(TABLE, one, compression="zstd", row_group_size=4)
    for path, first, count, options in (
        (three[0], 0, 6, {"compression": "none", "use_dictionary": False}),
        (three[1], 6, 1, {"data_page_size": 64}),
        (three[2], 7, 8, {"compression": "gzip", "row_group_size": 3, "data_page_version": "2.0"}),
    ):
        pyarrow.parquet.write_table(TABLE.slice(first, count), path, **options)
    assert read_rows([one])[1] == read_rows(three)[1] == WHOLE
    assert read_rows([three[1], three[0], three[2]])[1] != WHOLE


def test_the_order_of_columns_does_not_count() -> None:
    assert digest(TABLE.select(TABLE.column_names[::-1])) == WHOLE


@pytest.mark.parametrize(
    ("values", "kind", "other"),
    [
        (["a", None, "a"], pyarrow.string(), pyarrow.large_string()),
        (["a", None, "a"], pyarrow.string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
        (["a", None, ""], pyarrow.string(), pyarrow.string_view()),
        ([b"a", None], pyarrow.binary(), pyarrow.large_binary()),
        ([[1], None, []], pyarrow.list_(pyarrow.int8()), pyarrow.large_list(pyarrow.int8())),
        ([[1, 2], None], pyarrow.list_(pyarrow.int8()), pyarrow.list_(pyarrow.int8(), 2)),
    ],
)
def test_layouts_of_one_type_do_not_count(values: list[Any], kind: pyarrow.DataType, other: pyarrow.DataType) -> None:
    assert digest(pyarrow.table({"x": pyarrow.array(values, kind)})) == digest(
        pyarrow.table({"x": pyarrow.array(values, other)})
    )


def one_column(values: list[Any], kind: pyarrow.DataType | None = None) -> str:
    return digest(pyarrow.table({"x": pyarrow.array(values, kind)}))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], [2, 1]),
        ([1, None], [None, 1]),
        ([0, 1], [None, 1]),
        (["ab", "c"], ["a", "bc"]),
        (["", None], [None, ""]),
        ([[1], [2]], [[1, 2], []]),
        ([[], None], [None, []]),
        ([[None], []], [[], [None]]),
        ([{"a": None}, None], [None, {"a": None}]),
        ([{"a": 1, "b": 2}], [{"a": 2, "b": 1}]),
        ([0.0], [-0.0]),
        ([1.0], [float("nan")]),
        ([b"\x00"], [b"\x00\x00"]),
        ([True], [False]),
        ([1], ["1"]),
        ([1], [1, 1]),
        ([decimal.Decimal("1.5")], [decimal.Decimal("1.6")]),
        ([datetime.datetime(2025, 1, 1)], [datetime.datetime(2025, 1, 2)]),
    ],
)
def test_values_and_order_count(one: list[Any], two: list[Any]) -> None:
    assert one_column(one) != one_column(two)
    assert one_column(one) == one_column(list(one))


def test_every_value_of_every_column_counts() -> None:
    """Each cell in turn made null: all digests differ."""
    digests = {WHOLE}
    for at, row in enumerate(ROWS):
        for name, value in row.items():
            changed = [*ROWS[:at], {**row, name: None}, *ROWS[at + 1 :]]
            if value is not None:
                digests.add(digest(pyarrow.Table.from_pylist(changed * 3, schema=TABLE.schema)))
    num_values = sum(value is not None for row in ROWS for value in row.values())
    assert len(digests) == num_values + 1


def test_every_not_a_number_is_the_same() -> None:
    """Another bit pattern of NaN is no other value, in either precision."""
    for form, kind, bits in (("<d", pyarrow.float64(), 0xFFF8000000000001), ("<f", pyarrow.float32(), 0xFFC00001)):
        other = pyarrow.Array.from_buffers(
            kind, 1, [None, pyarrow.py_buffer(bits.to_bytes(struct.calcsize(form), "little"))]
        )
        assert digest(pyarrow.table({"x": other})) == one_column([float("nan")], kind)


def test_a_map_is_its_entries_in_order() -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    values = [[("a", 1), ("b", None)], None, [], [("c", 3)]]
    whole = pyarrow.table({"x": pyarrow.array(values, kind)})
    assert digest(whole) == digest(whole, batch_rows=1)
    assert digest(whole) != one_column([[("b", None), ("a", 1)], None, [], [("c", 3)]], kind)


def test_a_null_hides_what_lies_under_it() -> None:
    """A null slot's bytes are nobody's value."""
    data = pyarrow.array([1, 2, 3]).buffers()[1]
    mask = pyarrow.array([True, False, True]).buffers()[1]
    assert digest(pyarrow.table({"x": pyarrow.Array.from_buffers(pyarrow.int64(), 3, [mask, data])})) == one_column(
        [1, None, 3]
    )
    parent = pyarrow.StructArray.from_arrays([pyarrow.array([1, 2])], ["a"], mask=pyarrow.array([False, True]))
    assert digest(pyarrow.table({"x": parent})) == one_column([{"a": 1}, None])


def test_which_rows_a_column_belongs_to_counts() -> None:
    """Of two files, either may have the extra column: its values alone do not say whose they are."""
    plain, extra = pyarrow.table({"a": [1]}), pyarrow.table({"a": [1], "b": [2]})
    assert digest(plain, extra) != digest(extra, plain)


def test_the_canonical_form_by_hand() -> None:
    """Two rows of one text column, written down without the code: a digest that is recorded must never change."""
    streams = [
        ["x", "string", "length", hashlib.sha256(struct.pack("<q", 3)).hexdigest()],
        ["x", "string", "valid", hashlib.sha256(b"\x01\x00").hexdigest()],
        ["x", "string", "value", hashlib.sha256("aä".encode()).hexdigest()],
    ]
    whole = {"rows": 2, "columns": [["x", "string", [[0, 2]]]], "streams": streams}
    expected = hashlib.sha256(json.dumps(whole, separators=(",", ":")).encode()).hexdigest()
    assert one_column(["aä", None]) == expected


NESTED = st.fixed_dictionaries(
    {
        "a": st.none() | st.lists(st.none() | st.text(max_size=2), max_size=3),
        "b": st.none() | st.fixed_dictionaries({"c": st.none() | st.floats(width=32), "d": st.none() | st.binary()}),
        "e": st.none() | st.lists(st.lists(st.integers(0, 2), max_size=2) | st.none(), max_size=2),
    }
)
SCHEMA = pyarrow.schema(
    {
        "a": pyarrow.list_(pyarrow.string()),
        "b": pyarrow.struct({"c": pyarrow.float32(), "d": pyarrow.binary()}),
        "e": pyarrow.list_(pyarrow.list_(pyarrow.int32())),
    }
)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(
    one=st.lists(NESTED, min_size=1, max_size=6),
    two=st.lists(NESTED, min_size=1, max_size=6),
    cut=st.integers(0, 6),
    batch_rows=st.integers(1, 3),
)
def test_equal_if_and_only_if_the_rows_are(
    one: list[dict[str, Any]], two: list[dict[str, Any]], cut: int, batch_rows: int
) -> None:
    first, second = (pyarrow.Table.from_pylist(rows, schema=SCHEMA) for rows in (one, two))
    assert digest(first) == digest(first.slice(0, cut), first.slice(cut), batch_rows=batch_rows)
    assert (digest(first) == digest(second)) == (repr(first.to_pylist()) == repr(second.to_pylist()))
