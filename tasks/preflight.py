"""What is refused before an attempt begins."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from keepstep.checkpoint.plan import ResumePlan
from keepstep.config.schema import RunConfig
from keepstep.preflight.checks import FAIL, REWARD_SAMPLE, WARN, Check, OnNodes, examine, refusal
from tasks.artifacts import publish


@task(cache_policy=NO_CACHE)
def preflight(config: RunConfig) -> tuple[int, ResumePlan]:
    """All checks of `keepstep preflight`; (total steps, where the run goes on). Raises what a start is refused for.

    An attempt makes those that stop it once more itself, since each attempt changes what there is. Two are left to it:
    the nodes of a cluster, which it is on, and the dry run of the export, which imports what it needs anyway.
    """
    elsewhere: OnNodes | None = (lambda _: []) if config.ray.address else None
    checks, found = examine(config, on_nodes=elsewhere, heavy=(REWARD_SAMPLE,))
    for check in checks:
        if check.status in (WARN, FAIL):
            get_run_logger().warning("%s: %s", check.id, check.sentence)
    publish(table(checks), key="preflight", description="What was checked before the start")
    if error := refusal(checks):
        raise error
    return found.total_steps, found.plan


def table(checks: list[Check]) -> str:
    """Markdown table of the checks."""
    rows = [f"| {check.status} | {check.id} | {_cell(check.sentence)} | {_cell(check.remedy)} |" for check in checks]
    return "\n".join(["| | check | | what to do |", "|---|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
