"""The audit of runs that lie there: every checkpoint verified, on disk and in the store, and retention applied."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from keepstep.audit import GOOD, RunAudit, conclude, find_runs, report
from keepstep.errors import KeepstepError
from tasks.artifacts import publish
from tasks.audit import audit_run


@flow(name="checkpoint-audit")
def checkpoint_audit(runs: list[str] = ["runs/*"]) -> State[Any]:  # noqa: B006
    """Audit the named runs, one after the other. It fails, under a name that says why, when anything is bad.

    Args:
        runs: folders of runs, or globs; relative ones start where the deployment was registered.
    """
    audits: list[RunAudit] = []
    found, unanswered = find_runs(runs)
    for run in found:
        try:
            audits.append(audit_run(str(run.root)))
        except (KeepstepError, OSError) as error:
            # One run that cannot be looked at hides none of the others.
            unanswered.append(f"{run.root}: {error}")
    name, sentence = conclude(audits, unanswered)
    get_run_logger().info("%s", sentence)
    publish(report(audits, unanswered), key="checkpoint-audit", description="Every checkpoint that was looked at")
    return Completed(message=sentence) if name == GOOD else Failed(name=name, message=sentence)
