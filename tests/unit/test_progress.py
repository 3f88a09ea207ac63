"""Progress in the terminal: a live line on a real pseudo-terminal, plain lines where there is none."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from keepstep.cli.progress import figures_of

Event = dict[str, Any]
TELL = """
import json, sys
from keepstep.cli.progress import ProgressPrinter
show = ProgressPrinter()
for event in json.loads(sys.argv[1]):
    if event["event"] == "print":
        print(event["text"])
    else:
        show(event)
print("the summary")
"""
STEP: Event = {"event": "step", "step": 3, "total": 40, "reward": 0.5, "kl": 0.0123, "seconds": 2.0}
BEGIN: Event = {"event": "attempt_started", "attempt": 1, "total_steps": 40}
SAVED: Event = {"event": "checkpoint_saved", "step": 3, "outcome": "[red]published"}
FIGURES = "reward 0.500  KL 0.0123  2.00 s/step  1:14 left"
COLOUR = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")


def on_terminal(events: list[Event], stdout: Path | None = None, **environment: str) -> str:
    """What a terminal of 120 columns gets on standard error, and on standard output unless that goes to a file."""
    ours, theirs = pty.openpty()
    given = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    given |= {"TERM": "xterm-256color", "COLUMNS": "120"} | environment
    with stdout.open("wb") if stdout else os.fdopen(os.dup(theirs), "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", TELL, json.dumps(events)], stdin=theirs, stdout=out, stderr=theirs, env=given
        )
    os.close(theirs)
    told = b""
    # Reading fails once the last writer has closed a pseudo-terminal.
    try:
        while part := os.read(ours, 65536):
            told += part
    except OSError:
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, told
    return told.decode()


def test_plain_lines_without_a_terminal():
    """The first step at once, then one in 5 s; the last step always; everything else as it comes."""
    last = STEP | {"step": 40}
    events = [BEGIN, STEP, STEP | {"step": 4}, SAVED, last, {"event": "preempted", "message": "saved"}]
    done = subprocess.run([sys.executable, "-c", TELL, json.dumps(events)], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [
        "attempt 1 started",
        f"step    3/40  {FIGURES}",
        "checkpoint of step 3 saved ([red]published)",
        "step   40/40  reward 0.500  KL 0.0123  2.00 s/step  0:00 left",
        "preempted: saved",
    ]
    assert done.stdout == "the summary\n"


def test_a_dumb_terminal_gets_plain_lines():
    told = on_terminal([BEGIN, STEP, SAVED], TERM="dumb")
    assert "\x1b" not in told and f"step    3/40  {FIGURES}" in told


def test_a_terminal_gets_a_live_line():
    told = on_terminal([BEGIN, STEP, SAVED, {"event": "failed", "class": "bug", "message": "no"}])
    assert "starting, 40 steps in all" in told and f"step 3/40  {FIGURES}" in told
    # Above the live line, whole, and not taken for markup.
    assert "\x1b[2Kcheckpoint of step 3 saved ([red]published)\r\n" in told
    assert COLOUR.search(told)
    assert told.endswith("the summary\r\n")


def test_the_cursor_is_never_hidden_for_long():
    """A command that is killed could not bring it back."""
    told = on_terminal([BEGIN, STEP])
    hidden, shown = told.index("\x1b[?25l"), told.index("\x1b[?25h")
    assert hidden < shown < told.index(FIGURES)


def test_the_line_below_stays_free_without_a_last_event():
    """The command was asked to leave: what the shell prints next begins on a line of its own."""
    assert on_terminal([BEGIN, STEP]).removesuffix("\x1b[?25h").endswith("\r\n")


def test_no_color_is_honoured():
    told = on_terminal([BEGIN, STEP, SAVED], NO_COLOR="1")
    assert FIGURES in told and not COLOUR.search(told)


def test_standard_output_in_a_file_stays_there(tmp_path: Path):
    out = tmp_path / "out"
    told = on_terminal([BEGIN, STEP, {"event": "print", "text": "a result"}], out)
    assert out.read_text() == "a result\nthe summary\n" and "a result" not in told


def test_time_left_has_hours_from_one_hour_on():
    """It was 300:00 for five hours, which reads as minutes or as hours."""
    for mean_s, left in ((1.0, "1:30"), (39.99, "59:59"), (40.0, "1:00:00"), (208.9, "5:13:21")):
        event = STEP | {"step": 0, "total": 90}
        assert figures_of(event, mean_s).endswith(f" {left} left"), mean_s


def test_an_upload_tells_how_far_it_is():
    progress = {"event": "upload_progress", "step": 3, "done_bytes": 30, "num_bytes": 120}
    told = on_terminal([BEGIN, STEP, progress, SAVED, {"event": "checkpoint_uploaded", "step": 3}, SAVED])
    assert "(uploading step 3: 25%)" in told
    assert "uploading" not in told[told.rindex("uploaded and confirmed") :]
