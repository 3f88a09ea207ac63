"""One try is one attempt of the trainer; Prefect retries what another attempt can cure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import task_run

from keepstep.config.schema import RetryConfig, RunConfig
from keepstep.controller.launch import run_trainer
from keepstep.errors import KeepstepError, Preempted

Event = dict[str, Any]


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


def with_retries(retry: RetryConfig, stop: threading.Event) -> Task[..., Event]:
    """`train_grpo` under the run's retry policy."""

    def worth_another(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
        return not stop.is_set() and is_retryable(state)

    return train_grpo.with_options(
        retries=retry.max_retries,
        retry_delay_seconds=retry.delays_s or [0.0],
        retry_jitter_factor=retry.jitter,
        retry_condition_fn=worth_another,
    )


def is_retryable(state: State[Any]) -> bool:
    """Whether the error tree says that another attempt can succeed; what it does not know is not retried."""
    try:
        state.result()
    except KeepstepError as error:
        return error.retry
    except BaseException:
        return False
    return False


def without_asked_checkpoint(config: RunConfig) -> RunConfig:
    """`trainer.resume_from_checkpoint` holds for the first attempt of a start; later ones go on from what it saved."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume_from_checkpoint": None})})
