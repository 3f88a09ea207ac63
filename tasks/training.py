"""One try is one attempt of the trainer; Prefect tries again what another attempt can cure."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import task_run

from keepstep.config.load import without_asked_checkpoint
from keepstep.config.schema import RunConfig
from keepstep.controller.launch import run_trainer
from keepstep.errors import KeepstepError, Preempted
from keepstep.retry import Decision
from keepstep.retry_budget import RetryBudget
from keepstep.run import RunDir
from tasks.artifacts import in_background, publish, rename_task_run
from tasks.fell_back import tell_fallback

Event = dict[str, Any]

# Prefect's own count only has to be out of the way: `keepstep.retry` decides.
MOST_RETRIES = 10_000


@task(cache_policy=NO_CACHE)
def train_grpo(
    config: RunConfig, attempts: Attempts, on_event: Callable[[Event], None], stop: threading.Event
) -> Event:
    """Run one attempt to its end and return result.json's content.

    Args:
        attempts: what earlier tries have come to; told every event as well.
        on_event: told every event of the trainer, from this task's thread.
        stop: set when the flow is asked to leave.
    """
    stop.wait(attempts.pause_s)
    if stop.is_set():
        raise Preempted("Asked to leave before the attempt began.", "The same command goes on.")
    get_run_logger().info("try %s of train_grpo", task_run.run_count)

    def heard(event: Event) -> None:
        attempts.hear(event)
        on_event(event)

    return run_trainer(without_asked_checkpoint(config) if attempts.have_resumed else config, heard, stop)


class Attempts:
    """The attempts of one flow run: what is decided after each, and how they are shown."""

    def __init__(self, config: RunConfig, budget: RetryBudget) -> None:
        self.decision: Decision | None = None
        """After the last attempt."""
        self.pause_s = 0.0
        """To be waited before the next one."""
        self._retry, self._budget = config.retry, budget
        self._run = RunDir.at(config.trainer.output_dir)
        self._rows: list[list[str]] = []
        self._step = 0
        self._begun: int | None = None
        """The attempt that has begun and was not shown yet."""

    @property
    def have_resumed(self) -> bool:
        """Whether one has taken up a checkpoint; the one that was asked for is for the first that does."""
        return self._budget.has_resumed

    def check_budget(self) -> None:
        """Before the first attempt of a flow run that is run again: whether its budget allows one.

        Raises:
            KeepstepError: it does not; how the last attempt ended.
        """
        self.decision = self._budget.decide()
        if self.decision is not None and not self.decision.retry:
            raise self._budget.error()

    def hear(self, event: Event) -> None:
        """Take note of an event of the running attempt; from the task's thread."""
        self._budget.hear(event)
        if event["event"] == "attempt_started":
            self._begun = event["attempt"]
        elif event["event"] == "step":
            if self._begun is not None:
                # It loaded nothing; only its first step tells where it began.
                self._show(self._begun, event["step"] - 1)
            self._step = event["step"]
        elif event["event"] == "resumed":
            tell_fallback(self._run.root, event)
        elif event["event"] == "state_loaded":
            self._show(event["attempt"], event["step"])

    def worth_another(self, error: BaseException) -> bool:
        """Whether the attempt that ended with `error` is worth another; what the error tree does not know is not."""
        if not isinstance(error, KeepstepError):
            return False
        self.decision = self._budget.failed(error)
        self.pause_s = self.decision.delay_s * (1 + self._retry.jitter * random.random())
        then = f"yes, in {self.pause_s:.1f} s" if self.decision.retry else "no"
        get_logger("keepstep").info("another attempt: %s (%s)", then, self.decision.reason)
        return self.decision.retry

    def _show(self, attempt: int, resumed: int) -> None:
        """Name the task run after the attempt, and keep the table of all attempts, without holding anything up."""
        lost = max(0, self._step - resumed)
        after = self._budget.last.failure_class if self._budget.last else "a new start"
        self._rows.append([str(attempt), after, str(resumed), str(lost)])
        self._step, self._begun = resumed, None
        name = f"train_grpo attempt {attempt} from step {resumed}, after {after}, {lost} steps lost"
        rows = [f"| {' | '.join(row)} |" for row in self._rows]
        head = ["| attempt | after | from step | steps lost |", "|---|---|---|---|"]
        rename_task_run(name)
        in_background(
            lambda: publish("\n".join(head + rows), key="attempts", description="Each attempt and what it cost")
        )


def with_retries(attempts: Attempts, stop: threading.Event) -> Task[..., Event]:
    """`train_grpo`, tried again as `keepstep.retry` decides. The pause before a try is the task's own."""

    def worth_another(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        try:
            state.result()
        except BaseException as error:
            return not stop.is_set() and attempts.worth_another(error)
        return False

    return train_grpo.with_options(retries=MOST_RETRIES, retry_condition_fn=worth_another)
