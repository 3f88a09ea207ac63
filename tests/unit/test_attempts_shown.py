"""What the page says of attempts: the name of the training's task run, and what is told when one falls back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.retry_budget import RetryBudget
from keepstep.run import RunDir
from tasks import training

Event = dict[str, Any]


def step(number: int) -> Event:
    return {"event": "step", "step": number, "total": 40, "reward": 0.5}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[training.Attempts, list[str], list[Any]]:
    """(attempts of a run in `tmp_path`, names that the task run was given, resumes that were told)."""
    names: list[str] = []
    told: list[Any] = []
    monkeypatch.setattr(training, "rename_task_run", names.append)
    monkeypatch.setattr(training, "in_background", lambda _show: None)
    monkeypatch.setattr(training, "tell_fallback", lambda run, event: told.append((run, event["step"])))
    config = load("quickstart", [f"trainer.output_dir={tmp_path}"])
    return training.Attempts(config, RetryBudget(RunDir.at(tmp_path), "flow-run", config.retry)), names, told


def test_an_attempt_is_named_after_where_it_began(shown):
    """One that loads nothing by its first finished step; steps that a later one repeats were lost."""
    attempts, names, _ = shown
    for event in ({"event": "attempt_started", "attempt": 1}, step(1), step(2), step(3)):
        attempts.hear(event)
    assert names == ["train_grpo attempt 1 from step 0, after a new start, 0 steps lost"]
    for event in ({"event": "attempt_started", "attempt": 2}, step(1), step(2)):
        attempts.hear(event)
    assert names[1:] == ["train_grpo attempt 2 from step 0, after a new start, 3 steps lost"]
    loaded = {"event": "state_loaded", "attempt": 3, "step": 2, "sentences": []}
    for event in ({"event": "attempt_started", "attempt": 3}, loaded, step(3)):
        attempts.hear(event)
    assert names[2:] == ["train_grpo attempt 3 from step 2, after a new start, 0 steps lost"]


def test_each_resume_is_held_against_what_it_gives_up(shown, tmp_path: Path):
    attempts, _, told = shown
    attempts.hear({"event": "resumed", "attempt": 2, "step": 20, "plan": {}})
    assert told == [(tmp_path, 20)]
