"""A validation that is no part of a step just taken: before the first one, or owed by an attempt that left in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.controller.reporting import Reporter
from keepstep.controller.sinks import TensorBoard
from keepstep.controller.state import TrainState
from keepstep.controller.trainer import Metrics, Trainer
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir

FOUND = {"val/reward/mean": 0.25}


class Told:
    """Takes what the loop tells of validations."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, Metrics]] = []

    def __call__(self, step: int, metrics: Metrics) -> None:
        self.validations.append((step, metrics))


def fitted(monkeypatch: pytest.MonkeyPatch, step: int, metrics: Metrics, found: Metrics = FOUND) -> Told:
    """What `fit` tells when it begins at its last step, so that there is nothing to train."""
    told = Told()
    parts: Any = SimpleNamespace(report_validation=told, scorer=None)
    state = TrainState(global_step=step, metrics=dict(metrics))
    trainer = Trainer(load("quickstart", ["trainer.test_freq=20"]), parts, state, total_steps=step)

    def validate() -> Metrics:
        state.metrics |= found
        return found

    monkeypatch.setattr(trainer, "validate", validate)
    trainer.fit()
    return told


def test_the_policy_that_a_run_begins_with_is_told_as_step_0(monkeypatch: pytest.MonkeyPatch):
    assert fitted(monkeypatch, 0, {}).validations == [(0, FOUND)]


def test_an_owed_one_is_told_with_all_that_is_known_of_its_step(monkeypatch: pytest.MonkeyPatch):
    """Readers take the last line of a step: it must not hide the step's own."""
    own = {"critic/rewards/mean": 0.5}
    assert fitted(monkeypatch, 20, own).validations == [(20, own | FOUND)]


def test_what_was_validated_is_not_told_again(monkeypatch: pytest.MonkeyPatch):
    assert fitted(monkeypatch, 20, FOUND).validations == []


def test_without_a_validation_set_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    assert fitted(monkeypatch, 0, {}, found={}).validations == []


def test_it_is_written_where_steps_are(tmp_path: Path):
    run = RunDir.at(tmp_path / "run")
    reporter = Reporter(run, EventLog(run.events, 1), 40, [TensorBoard(run)])
    reporter.validated(0, FOUND)
    reporter.close(whole=True)
    (event,), (line,) = read_jsonl(run.events), read_jsonl(run.metrics)
    assert (event["event"], event["step"], event["total"], event["val_reward"]) == ("validated", 0, 40, 0.25)
    assert (line["step"], line["val/reward/mean"]) == (0, 0.25)
    assert list(run.tensorboard.glob("events.out.*"))
