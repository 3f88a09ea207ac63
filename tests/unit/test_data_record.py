"""The recorded data set against the one found: each difference in its own sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.data import record
from keepstep.data.count import FileRecord
from keepstep.data.offset import Position, explain, position
from keepstep.errors import DataError

COLUMNS = (("prompt", "string"), ("answer", "string"))


def entry(path: str, rows: int = 10, size: int = 1000, footer: str = "") -> FileRecord:
    """A file; by default each path has a footer of its own."""
    return FileRecord(path, rows, size, footer or (path.encode().hex() + "0" * 64)[:64], COLUMNS)


A, B, C, V = (entry(path) for path in ("a", "b", "c", "v"))
RECORDED = record.build([A, B, C], [V])


def differences(train: list[FileRecord], val: list[FileRecord] | None = None, **options: Any) -> list[str]:
    return record.compare(RECORDED, record.build(train, [V] if val is None else val), **options)


def test_the_record_is_plain_json() -> None:
    built = record.build([entry("a", 10), entry("b", 5)], [entry("v", 3)])
    assert built["num_rows"] == 15
    digest = A.schema_sha256
    assert built["files"][1] == {
        "path": "b", "rows": 5, "bytes": 1000, "footer_sha256": "62" + "0" * 62, "schema_sha256": digest,
    }  # fmt: skip
    assert [file["path"] for file in built["val_files"]] == ["v"]
    assert built["schemas"] == {digest: {"prompt": "string", "answer": "string"}}
    assert json.loads(json.dumps(built)) == built


def test_no_rows_at_all() -> None:
    with pytest.raises(DataError, match=r"hold no rows: a\.parquet"):
        record.build([entry("a.parquet", 0)], [entry("v", 3)])


def test_no_difference() -> None:
    assert differences([A, B, C]) == []
    assert record.notes(RECORDED, record.build([A, B, C], [V])) == []


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        # C2: fewer, more, and another file in its place.
        ([replace(A, rows=4), B, C], ["a: 10 rows expected, 4 found: 6 fewer"]),
        ([A, replace(B, rows=12), C], ["b: 10 rows expected, 12 found: 2 more"]),
        ([entry("z", 4), B, C], ["z (in place of a): 10 rows expected, 4 found: 6 fewer"]),
        ([entry("z"), B, C], ["z (in place of a): 10 rows in the same number of bytes, but other content", "61", "7a"]),
        # The same count with other rows.
        ([A, replace(B, bytes=999), C], ["b: 10 rows as expected, but 1000 bytes expected, 999 found"]),
        ([A, B, replace(C, footer_sha256="cd" * 32)], ["c: 10 rows in the same number of bytes", "cdcd"]),
        # Another schema.
        (
            [A, replace(B, footer_sha256="cd" * 32, columns=(("prompt", "string"), ("level", "int64"))), C],
            ["b: 10 rows as expected, other columns found: answer is missing, level is new"],
        ),
        (
            [A, replace(B, rows=9, columns=(("prompt", "large_string"), ("answer", "string"))), C],
            ["b: 10 rows expected, 9 found: 1 fewer, and other columns: prompt is large_string, was string"],
        ),
        (
            [A, replace(B, footer_sha256="cd" * 32, columns=COLUMNS[::-1]), C],
            ["b: 10 rows as expected, other columns found: the same ones in another order"],
        ),
        # Another order.
        ([B, A, C], ["training: the same 3 files in another order", "a, b, c expected, b, a, c found"]),
    ],
)  # fmt: skip
def test_one_difference_is_one_sentence(train: list[FileRecord], parts: list[str]) -> None:
    (sentence,) = differences(train)
    for part in parts:
        assert part in sentence


def test_a_file_that_is_gone() -> None:
    """C16: a shard of three against the record of all three: the lists are named, not a count alone."""
    assert differences([A, C]) == [
        "training: b (10 rows) is not among the files any more",
        "training: 3 files with 30 rows expected (a, b, c), 2 files with 20 rows found (a, c)",
    ]
    assert differences([B])[-1] == ("training: 3 files with 30 rows expected (a, b, c), 1 file with 10 rows found (b)")
    assert differences([A, B, C], val=[]) == [
        "validation: v (10 rows) is not among the files any more",
        "validation: 1 file with 10 rows expected (v), 0 files with 0 rows found (none)",
    ]


def test_a_file_that_was_added() -> None:
    assert differences([A, entry("x", 7), B, C]) == [
        "training: x (7 rows) was added",
        "training: 3 files with 30 rows expected (a, b, c), 4 files with 37 rows found (a, x, b, c)",
    ]


def test_added_and_changed_are_told_apart() -> None:
    found = differences([A, replace(B, rows=3), C, entry("x", 7)])
    assert found[0] == "b: 10 rows expected, 3 found: 7 fewer"
    assert "training: x (7 rows) was added" in found


def test_a_renamed_file_is_a_note() -> None:
    """The same content under another path is the same data."""
    moved = replace(B, path="elsewhere/b")
    assert differences([A, moved, C]) == []
    assert record.notes(RECORDED, record.build([A, moved, C], [V])) == [
        "training: b is the same file at elsewhere/b now"
    ]


def test_renamed_and_reordered() -> None:
    (sentence,) = differences([replace(B, path="elsewhere/b"), A, C])
    assert "in another order" in sentence


def test_shards_with_equal_footers_are_told_apart_by_their_paths() -> None:
    """Numbers of one width may give two shards the same footer: exchanged, their rows are in another order."""
    one, two = entry("one", footer="ab" * 32), entry("two", footer="ab" * 32)
    recorded = record.build([one, two], [])
    (sentence,) = record.compare(recorded, record.build([two, one], []))
    assert "one, two expected, two, one found" in sentence
    assert record.compare(recorded, record.build([replace(one, path="x/one"), replace(two, path="x/two")], [])) == []


def test_a_record_of_an_older_release_still_compares() -> None:
    """Without schemas, and without what is used."""
    old = json.loads(json.dumps(RECORDED))
    del old["schemas"]
    for file in (*old["files"], *old["val_files"]):
        del file["schema_sha256"]
    assert record.compare(old, record.build([A, B, C], [V])) == []
    other = replace(B, footer_sha256="cd" * 32, columns=(("x", "int64"),))
    (sentence,) = record.compare(old, record.build([A, other, C], [V]))
    assert "b: 10 rows in the same number of bytes, but other content" in sentence


# The position in other data


def test_what_the_position_would_mean_follows_the_differences() -> None:
    """C2: 3 steps of 16 on 100 rows, then a file of 20."""
    recorded = record.build([entry("a", 100)], [])
    found = record.build([entry("b", 20)], [])
    assert record.compare(recorded, found, consumed=48)[-1] == (
        "the run has consumed 48 rows of 100: it is 48 rows into epoch 1; the same position in these 20 rows is 8 rows "
        "into epoch 3: 2 passes more than it has done, so rows would be skipped"
    )
    assert record.compare(recorded, recorded, consumed=48) == []
    assert len(record.compare(recorded, found, consumed=0)) == 1
    # The position counts the rows that are used, where the run has recorded how many those are.
    recorded["used"] = {"train": {"rows": 40}}
    sentence = record.compare(recorded, found, consumed=48)[-1]
    assert "48 rows of 40: it is 8 rows into epoch 2" in sentence
    assert sentence.endswith("; the rows found are counted before cap and filter")


@pytest.mark.parametrize(
    ("consumed", "then", "now", "sentence"),
    [
        (
            12_800, 7473, 1000,
            "the run has consumed 12,800 rows of 7,473: it is 5,327 rows into epoch 2; the same position in these "
            "1,000 rows is 800 rows into epoch 13: 11 passes more than it has done, so rows would be skipped",
        ),
        (
            12_800, 7473, 20_000,
            "the run has consumed 12,800 rows of 7,473: it is 5,327 rows into epoch 2; the same position in these "
            "20,000 rows is 12,800 rows into epoch 1: 1 pass fewer than it has done, so rows would be repeated",
        ),
        (
            12_800, 7473, 7472,
            "the run has consumed 12,800 rows of 7,473: it is 5,327 rows into epoch 2; the same position in these "
            "7,472 rows is 5,328 rows into epoch 2: 2,144 rows would remain in this epoch instead of 2,146",
        ),
        (
            7473, 7473, 7473,
            "the run has consumed 7,473 rows of 7,473: it is 0 rows into epoch 2; the position would be the same, its "
            "rows would not: what was trained on is not what it counts",
        ),
        (5, 10, 0, "the run has consumed 5 rows of 10: it is 5 rows into epoch 1; this data has no row to go on with"),
    ],
)  # fmt: skip
def test_the_position_in_words(consumed: int, then: int, now: int, sentence: str) -> None:
    assert explain(consumed, num_rows_then=then, num_rows_now=now) == sentence


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(num_rows=st.integers(1, 50), consumed=st.integers(0, 200))
def test_a_position_is_that_of_counting_row_by_row(num_rows: int, consumed: int) -> None:
    epoch, row = 1, 0
    for _ in range(consumed):
        row += 1
        if row == num_rows:
            epoch, row = epoch + 1, 0
    assert position(consumed, num_rows) == Position(epoch, row)


# What is used of it


def usage(rows: int = 10, ids: str = "ab", content: str = "cd") -> dict[str, Any]:
    return {"rows": rows, "row_ids_sha256": ids * 32, "rows_sha256": content * 32}


def test_the_same_use() -> None:
    used = {"train": usage(), "val": usage(3)}
    assert record.compare_usage(used, used) == []
    # A run of an older release has recorded nothing of it.
    assert record.compare_usage({}, used) == []
    assert record.compare_usage({"train": usage()}, used) == []


@pytest.mark.parametrize("now", [usage(9, "ef"), usage(10, "ef")])
def test_another_use_names_both_counts_and_both_hashes(now: dict[str, Any]) -> None:
    """C1: a cap that was changed, or that draws other rows."""
    (sentence,) = record.compare_usage({"train": usage(), "val": usage()}, {"train": now, "val": usage()})
    assert sentence.startswith(f"train: 10 rows are used with SHA-256 of row numbers and prompt tokens {'ab' * 32}")
    assert f"now {now['rows']} rows with {'ef' * 32}" in sentence
    assert "data.train_max_samples" in sentence and "tokenizer" in sentence and "chat template" in sentence


def test_other_rows_under_the_same_footer() -> None:
    (sentence,) = record.compare_usage({"val": usage()}, {"val": usage(content="ef")})
    assert sentence.startswith("val: the files hold other rows, though their footers are the same")
    assert "cd" * 32 in sentence and "ef" * 32 in sentence
