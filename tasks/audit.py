"""The audit of one run. A store that does not answer is asked again; a damaged checkpoint is no error but a finding."""

from __future__ import annotations

import os
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger

from keepstep.audit import RunAudit, audit
from keepstep.errors import StorageError
from keepstep.run import RunDir

RETRIES, RETRY_DELAY_S = 2, 60.0
LEAST_URGENT = 19


def _store_may_answer(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    try:
        state.result()
    except StorageError as error:
        return error.retry
    except BaseException:
        return False
    return False


@task(
    task_run_name="audit {folder}",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=RETRY_DELAY_S,
    retry_condition_fn=_store_may_answer,
)
def audit_run(folder: str) -> RunAudit:
    """Verify every checkpoint of the run in `folder` and apply its retention. Raises what `keepstep.audit` raises."""
    # Reading goes on beside whatever trains here, and comes second.
    os.nice(LEAST_URGENT)
    found = audit(RunDir.at(folder))
    get_run_logger().info(
        "%d checkpoints, %d damaged, %d retired", len(found.looks), len(found.bad), len(found.retired)
    )
    for look in found.bad:
        get_run_logger().error("step %d on the %s: %s", look.step, look.place, "; ".join(look.problems))
    return found
