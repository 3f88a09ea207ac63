"""Where metrics are shown: one W&B run for all attempts, and nothing that is only shown ends or holds up a run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.controller import sinks
from keepstep.controller.reporting import Reporter
from keepstep.controller.sinks import STEP, TensorBoard, WeightsAndBiases, sinks_of
from keepstep.errors import ConfigError
from keepstep.events.log import EventLog, read_jsonl
from keepstep.run import RunDir


class UsageError(Exception):
    pass


class CommError(Exception):
    pass


class Wandb:
    """What is asked of the package. `fails` are what its next `init`s raise."""

    errors = SimpleNamespace(UsageError=UsageError, CommError=CommError)

    def __init__(self, *fails: Exception) -> None:
        self.fails, self.inits, self.logged, self.ended = list(fails), list[dict](), list[dict](), list[int]()
        self.axes: list[tuple[str, str]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self.settings = SimpleNamespace(sync_dir="runs/mine/wandb/run-1")

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings

    def init(self, **fields: Any) -> Wandb:
        self.inits.append(fields)
        if self.fails:
            raise self.fails.pop(0)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.append(metrics)

    def finish(self, exit_code: int) -> None:
        self.hangs.wait(30)
        self.ended.append(exit_code)


def given(monkeypatch: pytest.MonkeyPatch, *fails: Exception) -> Wandb:
    found = Wandb(*fails)
    monkeypatch.setitem(sys.modules, "wandb", found)  # type: ignore[arg-type]
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path / "mine")


def config(*more: str) -> RunConfig:
    return load("quickstart", ["trainer.logger=[console,wandb]", "trainer.project_name=letters", *more])


def test_all_attempts_are_one_run_there(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """Its own count of steps would refuse what is trained again after a resume."""
    wandb = given(monkeypatch)
    for whole in (False, True):
        board = WeightsAndBiases(run, "run-a", config())
        board.log(7, {"critic/rewards/mean": 0.5})
        board.close(whole)
    first, second = wandb.inits
    assert first == second
    assert (first["id"], first["resume"], first["project"], first["name"]) == (
        "run-a",
        "allow",
        "letters",
        "quickstart",
    )
    assert first["dir"] == str(run.root) and first["config"]["trainer"]["project_name"] == "letters"
    assert wandb.axes[0] == ("*", STEP) and wandb.logged == [{"critic/rewards/mean": 0.5, STEP: 7}] * 2
    assert wandb.ended == [1, 0]


def test_what_does_not_answer_gets_the_metrics_later(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    wandb = given(monkeypatch, CommError("connection refused"))
    monkeypatch.setattr(sinks.logger, "propagate", True)
    WeightsAndBiases(run, "run-a", config()).log(1, {})
    assert [init["settings"].get("mode") for init in wandb.inits] == [None, "offline"]
    assert "connection refused" in caplog.text and wandb.logged == [{STEP: 1}]


def test_an_end_that_takes_for_ever_is_not_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    wandb = given(monkeypatch)
    monkeypatch.setattr(sinks.logger, "propagate", True)
    monkeypatch.setattr(sinks, "LEAVE_TIMEOUT_S", 0.01)
    board = WeightsAndBiases(run, "run-a", config())
    wandb.hangs.clear()
    board.close(whole=False)
    assert "wandb sync runs/mine/wandb/run-1" in caplog.text and wandb.ended == []
    wandb.hangs.set()


def test_who_asks_for_it_in_vain_is_told_so(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    given(monkeypatch, UsageError("No API key configured."))
    with pytest.raises(ConfigError, match=r"W&B does not take us: No API key configured\.") as caught:
        WeightsAndBiases(run, "run-a", config())
    assert "WANDB_API_KEY" in caught.value.remedy
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="not installed here") as caught:
        WeightsAndBiases(run, "run-a", config())
    assert "pip install wandb" in caught.value.remedy


def test_it_is_only_where_it_is_asked_for(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """One step of `trainer.debug` is nothing of the run."""
    given(monkeypatch)
    kinds = lambda *more: [type(sink) for sink in sinks_of(run, "run-a", config(*more))]  # noqa: E731
    assert kinds() == [TensorBoard, WeightsAndBiases]
    assert kinds("trainer.debug=true") == kinds("trainer.logger=[console]") == [TensorBoard]


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(run: RunDir):
    class Other:
        def __init__(self, fails_at: int) -> None:
            self.fails_at, self.seen = fails_at, list[int]()

        def log(self, step: int, metrics: dict[str, float]) -> None:
            if step == self.fails_at:
                raise OSError("no space left")
            self.seen.append(step)

        def close(self, whole: bool) -> None:
            self.seen.append(-1)

    failing, sound = Other(2), Other(9)
    reporter = Reporter(run, EventLog(run.events, 1), 40, [failing, sound])
    for step in (1, 2, 3):
        reporter(step, {"critic/rewards/mean": 0.5})
    reporter.close(whole=True)
    assert failing.seen == [1] and sound.seen == [1, 2, 3, -1]
    assert [row["step"] for row in read_jsonl(run.metrics)] == [1, 2, 3]
