"""Two copies of a run's record: which one has been brought further, and that it counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.preflight.start import find_record
from keepstep.run import RunDir, write_json
from keepstep.storage import remote
from keepstep.waivers import is_further

FIRST = {"time": "2026-01-01T00:00:00Z", "attempt": 2, "fields": ["trainer.n_gpus_per_node"]}
SECOND = {"time": "2026-01-02T00:00:00Z", "attempt": 3, "fields": ["exactness"]}


def record(*waivers: dict[str, Any]) -> dict[str, Any]:
    return {"run_id": "run-a", "waivers": list(waivers)}


def test_further_is_who_has_accepted_more():
    assert is_further(record(FIRST), record()) and is_further(record(FIRST, SECOND), record(FIRST))
    assert not is_further(record(), record()) and not is_further(record(), record(FIRST))
    assert not is_further(record(SECOND, FIRST), record(FIRST)), "each has accepted something of its own"


@pytest.mark.parametrize(
    ("here", "there", "counts", "notes"),
    [
        (record(FIRST), record(FIRST), record(FIRST), []),
        (record(FIRST), record(), record(FIRST), []),
        (None, record(FIRST), record(FIRST), []),
        (record(FIRST), None, record(FIRST), []),
        (record(), record(FIRST), record(FIRST), ["has changed trainer.n_gpus_per_node: its record counts"]),
    ],
)
def test_a_folder_that_was_left_behind_learns_what_was_accepted_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Any, there: Any, counts: Any, notes: list[str]
):
    """The run went on where the disk is another one; what it gave up is not forgotten when this machine comes back."""
    run = RunDir.at(tmp_path / "run")
    if here is not None:
        write_json(run.record, here)
    store = SimpleNamespace(prefix="runs/a", fetch_record=lambda: there)
    monkeypatch.setattr(remote, "open_remote", lambda *_: store)
    found, _, said = find_record(load("quickstart", [f"trainer.output_dir={run.root}", "s3.bucket=b"]), run, None)
    assert found == counts
    assert len(said) == len(notes) and all(part in text for part, text in zip(notes, said, strict=True))
