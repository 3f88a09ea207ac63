"""Verification and upload of one checkpoint, as task runs of their own.

The work is done by the trainer's own processes, on the node that holds the bytes; these tasks await and show it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from keepstep.errors import NoProgressError

Event = dict[str, Any]


@task(task_run_name="verify-checkpoint-step-{step}", cache_policy=NO_CACHE)
def verify_checkpoint(step: int, confirmed: Future[Event], timeout_s: float) -> Event:
    """The event that says that the checkpoint is good. Raises `CheckpointError` when it was rejected."""
    return _await(f"the verification of step {step}", confirmed, timeout_s)


@task(task_run_name="upload-checkpoint-step-{step}", cache_policy=NO_CACHE)
def upload_checkpoint(step: int, confirmed: Future[Event], timeout_s: float | None) -> Event:
    """The event that says that the store holds the checkpoint."""
    return _await(f"the upload of step {step}", confirmed, timeout_s)


def _await(what: str, confirmed: Future[Event], timeout_s: float | None) -> Event:
    try:
        return confirmed.result(timeout=timeout_s)
    except TimeoutError:
        raise NoProgressError(f"Nothing was heard of {what} within {timeout_s:.0f} s.") from None
