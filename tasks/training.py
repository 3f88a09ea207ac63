"""One try is one attempt of the trainer; Prefect retries what another attempt can cure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import task_run

from keepstep.config.load import without_asked_checkpoint
from keepstep.config.schema import RetryConfig, RunConfig
from keepstep.controller.launch import run_trainer
from keepstep.errors import KeepstepError, Preempted
from keepstep.retry import Failure, decide

Event = dict[str, Any]

# Prefect's own count only has to be out of the way: `retry.max_retries` bounds failures, kills are not bounded.
MOST_RETRIES = 10_000


@task(cache_policy=NO_CACHE)
def train_grpo(config: RunConfig, on_event: Callable[[Event], None], stop: threading.Event) -> Event:
    """Run one attempt to its end and return result.json's content.

    Args:
        on_event: told every event of the trainer, from this task's thread.
        stop: set when the flow is asked to leave.
    """
    if stop.is_set():
        raise Preempted("Asked to leave before the attempt began.", "The same command goes on.")
    get_run_logger().info("try %s of train_grpo", task_run.run_count)
    first_try = task_run.run_count == 1
    return run_trainer(config if first_try else without_asked_checkpoint(config), on_event, stop)


class AttemptHistory:
    """How the attempts of one flow run ended and how far they had come: what the retry decision is made from."""

    def __init__(self, retry: RetryConfig) -> None:
        self._retry = retry
        self._failures: list[Failure] = []
        self._step = 0
        self._verified = 0

    def listen(self, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        """`on_event`, told what this history learns on the way."""

        def heard(event: Event) -> None:
            if event["event"] == "step":
                self._step = event["step"]
            elif event["event"] == "checkpoint_verified":
                self._verified = max(self._verified, event["step"])
            on_event(event)

        return heard

    def worth_another(self, error: BaseException) -> bool:
        """Whether the attempt that ended with `error` is worth another; what the error tree does not know is not."""
        if not isinstance(error, KeepstepError):
            return False
        self._failures.append(Failure(error.failure_class, error.message, error.retry, self._step, self._verified))
        decision = decide(self._failures, self._retry.max_retries)
        get_logger("keepstep").info("another attempt: %s (%s)", "yes" if decision.retry else "no", decision.reason)
        return decision.retry


def with_retries(retry: RetryConfig, stop: threading.Event, history: AttemptHistory) -> Task[..., Event]:
    """`train_grpo` under the run's retry policy: the decision is `keepstep.retry`'s, the waits are Prefect's."""

    def worth_another(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        try:
            state.result()
        except BaseException as error:
            return not stop.is_set() and history.worth_another(error)
        return False

    return train_grpo.with_options(
        retries=MOST_RETRIES,
        retry_delay_seconds=retry.delays_s or [0.0],
        retry_jitter_factor=retry.jitter,
        retry_condition_fn=worth_another,
    )
