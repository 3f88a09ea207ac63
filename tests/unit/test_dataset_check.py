"""`keepstep dataset check` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from keepstep.cli.main import main
from keepstep.data import record
from keepstep.data.count import count_rows, read_rows
from keepstep.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from keepstep.run import RunDir, write_json
from tests.unit import builder


def write(path: Path, first: int, num_rows: int, **options: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {"prompt": [f"{at}+1=" for at in range(first, first + num_rows)], "answer": list(range(num_rows))}
    pyarrow.parquet.write_table(pyarrow.table(rows), path, **options)
    return str(path)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Two training files of 30 and 12 rows, and one of 5 for validation."""
    sizes = {"a": (0, 30), "b": (30, 12), "val": (90, 5)}
    return [write(tmp_path / f"{name}.parquet", *size) for name, size in sizes.items()]


@pytest.fixture
def run(tmp_path: Path, shards: list[str]) -> RunDir:
    """A run that was started with them and has a checkpoint after 20 steps of 4 rows."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    train, val = count_rows(shards[:2]), count_rows(shards[2:])
    used = {
        split: {"rows": 42, "row_ids_sha256": "ab" * 32, "rows_sha256": read_rows(files)[1]}
        for split, files in (("train", shards[:2]), ("val", shards[2:]))
    }
    write_json(run.record, {"run_id": "run-a", "dataset": {**record.build(train, val), "used": used}})
    return run


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["dataset", "check", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_in_words(shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dataset", "check", *shards[:2], "--expect-rows", "43"]) == EXIT_DATA
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"          30 rows  {shards[0]}",
        f"          12 rows  {shards[1]}",
        "          42 rows in 2 files, expected 43 by --expect-rows",
    ]
    assert printed.err == f"keepstep: {shards[0]}, {shards[1]}: 42 rows, expected 43\n"


def test_deep_gives_the_digest_of_the_rows(shards: list[str], tmp_path: Path, capsys: Any) -> None:
    """The same rows in one file have the same digest."""
    one = write(tmp_path / "one.parquet", 0, 30, compression="gzip")
    status, found = answer(capsys, shards[0], "--deep")
    assert status == 0 and len(found["rows_sha256"]) == 64
    assert answer(capsys, one, "--deep")[1]["rows_sha256"] == found["rows_sha256"]
    assert answer(capsys, one)[1]["rows_sha256"] is None


# Against a run


def test_no_rows_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty shard beside others is nothing unusual; nothing but empty ones is."""
    empty = write(tmp_path / "empty.parquet", 0, 0)
    assert main(["dataset", "check", empty]) == EXIT_DATA
    assert f"{empty}: no rows, so there is nothing to train on" in capsys.readouterr().err
    assert main(["dataset", "check", empty, write(tmp_path / "more.parquet", 0, 3)]) == EXIT_DONE
    assert main(["dataset", "check", empty, "--expect-rows", "0"]) == EXIT_DONE


def test_the_files_of_the_run(run: RunDir, shards: list[str], capsys: Any) -> None:
    """By their split: training files, validation files, both."""
    for files, expected in ((shards[:2], 42), (shards[2:], 5), (shards, 47)):
        for flags in ([], ["--deep"]):
            status, found = answer(capsys, *files, "--run", str(run.root), *flags)
            assert (status, found["problems"], found["notes"]) == (0, [], [])
            assert (found["num_rows"], found["expected"]) == (expected, expected)


def test_one_shard_of_two(run: RunDir, shards: list[str], capsys: Any) -> None:
    """C16: the expected count belongs to the list of files that it was taken from, and both lists are named."""
    status, found = answer(capsys, shards[0], "--run", str(run.root))
    assert status == EXIT_DATA
    assert found["problems"] == [
        f"training: {shards[1]} (12 rows) is not among the files any more",
        f"training: 2 files with 42 rows expected ({shards[0]}, {shards[1]}), 1 file with 30 rows found ({shards[0]})",
    ]


def test_other_data_and_what_the_position_would_mean_in_it(run: RunDir, tmp_path: Path, capsys: Any) -> None:
    """C2: name, path, rows of both; 80 of 42 rows are consumed by the newest checkpoint."""
    other = write(tmp_path / "other.parquet", 0, 20)
    status, found = answer(capsys, other, "--run", str(run.root))
    assert status == EXIT_DATA
    assert f"training: {other} (20 rows) was added" in found["problems"]
    assert found["notes"][-1] == (
        "the run has consumed 80 rows of 42: it is 38 rows into epoch 2; the same position in these 20 rows is 0 rows "
        "into epoch 5: 3 passes more than it has done, so rows would be skipped"
    )


def test_a_moved_file_is_a_note(run: RunDir, shards: list[str], tmp_path: Path, capsys: Any) -> None:
    moved = tmp_path / "moved" / "b.parquet"
    moved.parent.mkdir()
    Path(shards[1]).rename(moved)
    status, found = answer(capsys, shards[0], str(moved), "--run", str(run.root))
    assert (status, found["problems"]) == (0, [])
    assert found["notes"] == [f"training: {shards[1]} is the same file at {moved} now"]


def test_rows_that_changed_under_the_same_footer(run: RunDir, shards: list[str], capsys: Any) -> None:
    """A value changed in place: sizes, counts and footer stay. Only a deep check sees it."""
    path = Path(shards[0])
    write(path, 0, 30, compression="none", use_dictionary=False)
    recorded = json.loads(run.record.read_text())
    recorded["dataset"] |= record.build(count_rows(shards[:2]), count_rows(shards[2:]))
    recorded["dataset"]["used"]["train"]["rows_sha256"] = read_rows(shards[:2])[1]
    write_json(run.record, recorded)
    data = path.read_bytes()
    assert data.count(b"17+1=") == 1
    path.write_bytes(data.replace(b"17+1=", b"18+1="))
    assert answer(capsys, *shards[:2], "--run", str(run.root))[0] == 0
    status, found = answer(capsys, *shards[:2], "--run", str(run.root), "--deep")
    assert status == EXIT_DATA
    (problem,) = found["problems"]
    assert problem.startswith("train: footers and counts are the same, the rows are not: SHA-256 ")
    assert found["rows_sha256"] in problem


def test_a_run_that_recorded_no_digest(run: RunDir, shards: list[str], capsys: Any) -> None:
    recorded = json.loads(run.record.read_text())
    del recorded["dataset"]["used"]
    write_json(run.record, recorded)
    status, found = answer(capsys, *shards[:2], "--run", str(run.root), "--deep")
    assert (status, found["problems"]) == (0, [])
    assert found["notes"] == ["train: the run has recorded no SHA-256 of its rows yet: only footers were compared"]


# Against a log


@pytest.mark.parametrize(
    ("log", "status", "part"),
    [
        ("Loaded train dataset: 42 rows\nTrain dataset after filtering: 40 rows\n", 0, None),
        ("dataset len: 42\ndataset len: 5\nSize of train dataloader: 1\n", 0, None),
        ("dataset len: 42\nfilter dataset len: 40\ndataset len: 5\nfilter dataset len: 5\n", 0, None),
        ("Loaded train dataset: 43 rows\n", EXIT_DATA, "42 rows, expected 43 (the training rows of the last start in"),
        ("dataset len: 50\ndataset len: 42\n", EXIT_DATA, "42 are its validation rows"),
        ("dataset len: 30\ndataset len: 12\n", EXIT_DATA, "the training and the validation rows together"),
        (
            "Loaded train dataset: 50 rows\nTrain dataset after filtering: 42 rows\n",
            EXIT_DATA,
            "42 were left after its filter: are these files already filtered?",
        ),
        ("Train dataset after filtering: 43 rows\n", EXIT_DATA, "43 were left after its filter: rows are missing"),
    ],
)
def test_against_a_log(shards: list[str], tmp_path: Path, log: str, status: int, part: str | None, capsys: Any) -> None:
    """A count is compared with what it counts: training files, before the filter; the message names the files."""
    path = tmp_path / "train.log"
    path.write_text(log)
    found_status, found = answer(capsys, *shards[:2], "--log", str(path))
    assert found_status == status
    if part is None:
        assert found["problems"] == [] and found["expected"] == 42
        assert found["against"] == f"the training rows that {path} names"
    else:
        (problem,) = found["problems"]
        assert part in problem and shards[0] in problem and shards[1] in problem and str(path) in problem


def test_a_count_after_the_filter_is_not_held_against_raw_rows(shards: list[str], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.log"
    path.write_text("Train dataset after filtering: 40 rows\n")
    status, found = answer(capsys, *shards[:2], "--log", str(path))
    assert (status, found["expected"], found["problems"]) == (0, None, [])
    assert found["notes"] == [
        f"{path} names training rows after the filter only (40), which are not the rows of the files (42): nothing "
        "contradicts them, and nothing proves that they are the same"
    ]


@pytest.mark.parametrize(
    ("log", "part"),
    [
        (None, "is not a file"),
        ("step 1\n", "names no count of rows"),
        ("Loaded val dataset: 5 rows\n", "names validation rows only"),
        ("dataset len: 1\ndataset len: 2\ndataset len: 3\n", "do not say which are the training set's"),
    ],
)
def test_a_log_that_says_nothing(
    shards: list[str], tmp_path: Path, log: str | None, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    if log is not None:
        path.write_text(log)
    assert main(["dataset", "check", *shards[:2], "--log", str(path)]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert part in printed.err and str(path) in printed.err and printed.out == ""


def test_a_thousand_files(tmp_path: Path, capsys: Any) -> None:
    """All are counted, in the order of their names, by one reader."""
    first = Path(write(tmp_path / "0000.parquet", 0, 10))
    for at in range(1, 1000):
        (tmp_path / f"{at:04}.parquet").hardlink_to(first)
    status, found = answer(capsys, str(tmp_path / "*.parquet"), "--expect-rows", "10000")
    assert (status, len(found["files"]), found["num_rows"]) == (0, 1000, 10_000)
    assert [Path(file["path"]).name for file in found["files"]] == [f"{at:04}.parquet" for at in range(1000)]
