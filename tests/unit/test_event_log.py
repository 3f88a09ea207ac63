"""Lines of events.jsonl and metrics.jsonl on a disk that is full for a moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from keepstep.events import log
from keepstep.events.log import SIGN_OF_LIFE, EventLog, JsonLines, read_jsonl


def test_a_line_of_which_the_disk_took_a_part_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError) as full:
        lines.append({"step": 2})
    assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "metrics.jsonl")
    monkeypatch.undo()
    lines.append({"step": 3})
    lines.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_sign_of_life_is_told_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not more often than anybody needs: a step has many answers."""
    events, told = EventLog(tmp_path / "events.jsonl", 1), []
    events.listeners.append(lambda event: told.append(event["event"]))
    events.sign_of_life()
    assert told == [], "the log has just been opened"
    monkeypatch.setattr(log, "SIGN_INTERVAL_S", 0.0)
    events.sign_of_life()
    events.emit("step", step=1)
    assert told == [SIGN_OF_LIFE, "step"]
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["step"]


def test_who_writes_after_the_end_hits_no_other_file(tmp_path: Path):
    events = EventLog(tmp_path / "events.jsonl", 1)
    events.close()
    with (tmp_path / "other").open("wb"), pytest.raises(OSError):
        events.emit("step", step=1)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_line_that_a_kill_has_cut_is_closed_by_the_next_attempt(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "step", "st')
    log = EventLog(path, 2)
    log.emit("step", step=7)
    log.close()
    assert [event["step"] for event in read_jsonl(path)] == [7]
