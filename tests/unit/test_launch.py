"""Following a trainer's output: events wherever they stand in a line, and the error that the last one speaks of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from keepstep import errors
from keepstep.config.load import load
from keepstep.controller import launch


def line(**event: object) -> str:
    return launch.EVENT_PREFIX + json.dumps(event) + "\n"


def test_events_survive_prints_without_a_line_end():
    heard: list[dict] = []
    lines = ["noise\n", "..." + line(event="step", step=1), line(event="finished", result={}), "bye\n"]
    last, tail = launch._follow(lines, heard.append)
    assert [event["event"] for event in heard] == ["step", "finished"]
    assert last == {"event": "finished", "result": {}}
    assert tail == ["noise", "...", "bye"]


@pytest.mark.parametrize(
    ("name", "cls"),
    [("config", errors.ConfigError), ("preempted", errors.Preempted), ("storage_refused", errors.StorageRefusedError)],
)
def test_error_of_a_terminal_event(name: str, cls: type[errors.KeepstepError]):
    found = launch.error_of({"event": "failed", "class": name, "message": "m", "remedy": "r", "retry": True})
    assert type(found) is cls and (found.message, found.remedy, found.budget) == ("m", "r", cls.budget)


def test_silent_trainer_is_ended():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    silence = launch._Silence(load("quickstart"), process)
    assert silence.limit_s == 1800 + 1800 + launch.SILENCE_MARGIN_S
    silence.limit_s = 0.1
    silence.watch()
    assert silence.too_long
    assert process.wait(timeout=10) < 0
