"""Following a trainer's output: events wherever they stand in a line, and the error that the last one speaks of."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from keepstep import errors
from keepstep.cli.main import main
from keepstep.cli.train_command import early_failure
from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.controller import attempt, launch
from keepstep.events.log import SIGN_OF_LIFE


def line(**event: object) -> str:
    return launch.EVENT_PREFIX + json.dumps(event) + "\n"


def test_events_survive_prints_without_a_line_end():
    heard: list[dict] = []
    lines = ["noise\n", "..." + line(event="step", step=1), line(event="finished", result={}), "bye\n"]
    last, tail = launch._follow(lines, heard.append)
    assert [event["event"] for event in heard] == ["step", "finished"]
    assert last == {"event": "finished", "result": {}}
    assert tail == ["noise", "...", "bye"]


def test_an_event_that_a_kill_has_cut_is_no_event():
    heard: list[dict] = []
    cut = line(event="finished", result={})[:-3]
    last, tail = launch._follow([line(event="step", step=1), cut], heard.append)
    assert [event["event"] for event in heard] == ["step"]
    assert (last, tail) == (None, [cut])


def test_output_that_another_process_holds_open_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A child of the trainer that inherited its output outlives it; what the attempt recorded is ended."""
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    too_late = threading.Timer(30.0, holder.kill)
    too_late.start()
    ended: list[int] = []

    def end_leftovers(_config: RunConfig, pid: int) -> None:
        ended.append(pid)
        holder.kill()

    monkeypatch.setattr(launch, "EOF_PATIENCE_S", 0.1)
    monkeypatch.setattr(launch, "_end_leftovers", end_leftovers)
    real = subprocess.Popen

    def start(command: list[str], **given: Any) -> Any:
        child = real([sys.executable, "-c", "pass"], **given | {"stdout": subprocess.DEVNULL})
        child.stdout = io.TextIOWrapper(holder.stdout)
        return child

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    config = load("quickstart", [f"trainer.output_dir={tmp_path}"])
    last = launch._run_child(config, lambda event: None, threading.Event())
    too_late.cancel()
    assert last["class"] == "worker_died"
    # By whoever waits for the end of the output, and once more by the caller, as after every trainer.
    assert len(ended) == 2 and len(set(ended)) == 1
    assert holder.wait(timeout=10) < 0


@pytest.mark.parametrize(
    ("name", "cls"),
    [("config", errors.ConfigError), ("preempted", errors.Preempted), ("storage_refused", errors.StorageRefusedError)],
)
def test_error_of_a_terminal_event(name: str, cls: type[errors.KeepstepError]):
    found = launch.error_of({"event": "failed", "class": name, "message": "m", "remedy": "r", "retry": True})
    assert type(found) is cls and (found.message, found.remedy, found.budget) == ("m", "r", cls.budget)


def test_a_sign_of_life_breaks_the_silence_and_goes_no_further():
    silence = launch._Silence(load("quickstart"), subprocess.Popen([sys.executable, "-c", "pass"], text=True))
    heard: list[dict] = []
    silence._heard = 0.0
    silence.breaking(heard.append)({"event": SIGN_OF_LIFE, "attempt": 1})
    assert silence._heard > 0.0 and heard == []


def test_the_same_end_of_a_trainer_has_the_same_message():
    """Messages are compared: pids and what was printed differ from attempt to attempt."""
    first, second = (launch._lost("The trainer ended with 1", [f"line of {n}"], f"It was process {n}.") for n in (4, 5))
    assert first["message"] == second["message"] and first["remedy"] != second["remedy"]
    assert "line of 4" in first["remedy"] and "process 4" in first["remedy"]


def test_whatever_ends_the_trainer_is_its_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An end without a word would count as a kill from outside, which is tried again at once and always."""

    def run_attempt(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(attempt, "run_attempt", run_attempt)
    config = load("quickstart", [f"trainer.output_dir={tmp_path / 'run'}"])
    for name, value in launch._variables(config).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError):
        main(["train", "--from-env", "--events-stdout"])
    last, _ = launch._follow(capsys.readouterr().out.splitlines(), lambda event: None)
    assert last is not None and (last["class"], last["message"]) == ("bug", "RuntimeError: no such thing")


def test_silent_trainer_is_ended():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    silence = launch._Silence(load("quickstart"), process)
    assert silence.limit_s == launch.WAITS_OF_A_START * 600 + launch.SILENCE_MARGIN_S
    silence.limit_s = 0.1
    silence.watch()
    assert silence.too_long
    assert process.wait(timeout=10) < 0


@pytest.mark.parametrize(
    ("error", "failure_class", "budget"),
    [
        (errors.ConfigError("no such model"), "config", "never"),
        (OSError(116, "Stale file handle"), "worker_died", "kills"),
        (OSError(28, "No space left on device"), "no_room", "never"),
        (ValueError("a bug"), "bug", "failures"),
    ],
)
def test_what_ends_an_attempt_before_it_has_a_record(error: Exception, failure_class: str, budget: str):
    """A network's disk that is restarted is no bug: as one, the second time would stop the run for good."""
    found = early_failure(error)
    assert (found.failure_class, found.budget) == (failure_class, budget)
