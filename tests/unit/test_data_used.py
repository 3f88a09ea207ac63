"""What a run uses of its data set: recorded at its first start, held against it at every later one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller.training import load_data
from keepstep.errors import EXIT_DATA, DataError
from keepstep.run import RunDir, read_json, write_json
from tests.unit.test_dataset import CharTokenizer, numbers


class Start:
    """One start of a run after another, with what `load_data` needs of a session."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir.at(folder / "run")
        self.run.root.mkdir()
        self.files = [numbers(folder / "train.parquet", 200)], [numbers(folder / "val.parquet", 20)]
        self.num_checks = 0
        self.tokenizer = CharTokenizer()
        write_json(self.run.record, {"run_id": "a", "dataset": {"num_rows": 200}})
        model = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda _, **_rest: self.tokenizer))
        monkeypatch.setitem(sys.modules, "transformers", model)

    def __call__(self, *overrides: str) -> dict[str, Any]:
        """Load the data, and give what run.json has of it then."""

        def check() -> None:
            self.num_checks += 1

        session = SimpleNamespace(
            config=load("quickstart", list(overrides)),
            start=SimpleNamespace(train_files=self.files[0], val_files=self.files[1]),
            record=read_json(self.run.record),
            run=self.run,
            attempt=SimpleNamespace(check=check),
        )
        self.train_set, self.val_set, _ = load_data(session, "model")
        return read_json(self.run.record)["dataset"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path, monkeypatch)


def test_the_first_start_records_and_a_later_one_agrees(start: Start) -> None:
    """C1: a cap of 50 of 200 rows with no seed of its own; killed and started again it has the same rows."""
    recorded = start("data.train_max_samples=50")
    assert recorded["num_rows"] == 200
    assert recorded["used"]["train"] == start.train_set.usage()
    assert (recorded["used"]["train"]["rows"], recorded["used"]["val"]["rows"]) == (50, 20)
    assert start.num_checks == 1, "an attempt that lost the run must not write"
    first = [row.index for row in start.train_set.rows]
    before = start.run.record.stat()
    assert start("data.train_max_samples=50") == recorded
    assert [row.index for row in start.train_set.rows] == first
    assert start.run.record.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("data.train_max_samples=49", "now 49 rows"),
        ("data.train_max_samples=-1", "now 200 rows"),
        ("trainer.seed=7", "now 50 rows"),
        ("data.shuffle=false", "now 50 rows"),
    ],
)
def test_other_rows_stop_the_resume_with_both_hashes(start: Start, override: str, count: str) -> None:
    """C1: a mismatch is a data error that names both counts and both hashes; nothing is written."""
    used = start("data.train_max_samples=50")["used"]
    before = start.run.record.read_bytes()
    with pytest.raises(DataError) as caught:
        start("data.train_max_samples=50", override)
    assert caught.value.exit_code == EXIT_DATA
    assert (
        f"train: 50 rows are used with SHA-256 of row numbers and prompt tokens {used['train']['row_ids_sha256']}"
        in (caught.value.message)
    )
    assert count in caught.value.message
    assert str(start.run.root) in caught.value.message
    assert start.run.record.read_bytes() == before


def test_another_tokenizer_is_seen(start: Start) -> None:
    start()
    start.tokenizer = CharTokenizer(begin=1)
    with pytest.raises(DataError, match=r"train: 200 rows are used .* now 200 rows .* the tokenizer"):
        start()


def test_a_run_of_an_older_release_gets_its_record(start: Start) -> None:
    """Nothing is known of what it used: from now on it is."""
    recorded = start()
    old = read_json(start.run.record)
    del old["dataset"]["used"]
    write_json(start.run.record, old)
    assert start() == recorded


def test_a_run_without_validation(start: Start) -> None:
    start.files = start.files[0], []
    assert set(start()["used"]) == {"train"}
    assert start.val_set is None
