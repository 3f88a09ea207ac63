"""Lines of events.jsonl and metrics.jsonl on a disk that is full for a moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from keepstep.events.log import EventLog, JsonLines, read_jsonl


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


def test_a_line_that_a_kill_has_cut_is_closed_by_the_next_attempt(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "step", "st')
    log = EventLog(path, 2)
    log.emit("step", step=7)
    log.close()
    assert [event["step"] for event in read_jsonl(path)] == [7]
