"""Which checkpoint the run goes on from, and why."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from keepstep.checkpoint.plan import ResumePlan
from tasks.artifacts import publish_decision


@task(cache_policy=NO_CACHE)
def plan_resume(plan: ResumePlan) -> int | None:
    """Publish the plan that the checks made; its step, None for the beginning.

    Nothing is handed to the trainer: it plans anew at every attempt, since an attempt changes what there is.
    """
    for sentence in plan.describe():
        get_run_logger().info(sentence)
    publish_decision(plan)
    return plan.step
