"""What a training attempt writes for people: train.log, metrics.jsonl, the step events, and what `sinks` show."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keepstep.config.load import to_dotted
from keepstep.config.schema import RunConfig
from keepstep.events.log import EventLog, JsonLines, utc_now
from keepstep.run import RunDir

logger = logging.getLogger("keepstep")

STEP_FIELDS = {
    "critic/rewards/mean": "reward",
    "actor/kl_loss": "kl",
    "actor/lr": "lr",
    "response_length/mean": "response_length",
    "val/reward/mean": "val_reward",
    "timing_s/step": "seconds",
}


def open_log(run: RunDir, attempt: int) -> None:
    """Send the log of this process to logs/attempt_<n>/train.log."""
    path = run.train_log(attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for old in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_config(config: RunConfig) -> None:
    """Every setting as a dotted `key=value` line."""
    for line in to_dotted(config):
        logger.info(line)


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The same step may come again, after a resume: with the values that it had."""

    def close(self, whole: bool) -> None:
        """No more metrics; `whole`: the run is complete."""


class Reporter:
    """Called with the metrics of every finished step, and told of a validation between steps."""

    def __init__(self, run: RunDir, events: EventLog, total_steps: int, sinks: Sequence[Sink]) -> None:
        self._events = events
        self._total_steps = total_steps
        self._attempt = events.attempt
        self._metrics = JsonLines(run.metrics)
        self._sinks = list(sinks)

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self._tell("step", step, metrics, metrics)

    def validated(self, step: int, metrics: dict[str, float]) -> None:
        """Before the first step, and of a step whose validation an earlier attempt did not finish.

        Args:
            metrics: with the step's own: readers take the last line of a step.
        """
        self._tell("validated", step, metrics, {name: metrics[name] for name in metrics if name.startswith("val/")})

    def _tell(self, event: str, step: int, metrics: dict[str, float], new: dict[str, float]) -> None:
        fields = {short: new[name] for name, short in STEP_FIELDS.items() if name in new}
        self._events.emit(event, step=step, total=self._total_steps, **fields)
        line: dict[str, Any] = {"time": utc_now(), "attempt": self._attempt, "step": step, **metrics}
        self._metrics.append(line)
        self._show(lambda sink: sink.log(step, new))
        told = " ".join(f"{key}={value:.6g}" for key, value in fields.items())
        logger.info("%s %d/%d %s", event, step, self._total_steps, told)

    def close(self, whole: bool) -> None:
        """No more metrics; `whole`: the run is complete."""
        self._show(lambda sink: sink.close(whole))
        self._metrics.close()

    def _show(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning("%s shows no more: %s: %s", type(sink).__name__, type(error).__name__, error)
