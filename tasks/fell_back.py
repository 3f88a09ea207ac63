"""An attempt that goes on from an older checkpoint than the newest: told as an event of Prefect, for automations."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from prefect.events import emit_event
from prefect.runtime import flow_run

from tasks.artifacts import in_background

Event = dict[str, Any]

FELL_BACK = "keepstep.resume.fell-back"
"""Known to deployments/notifications.yaml."""
ASKED_FOR = "asked for"
MOST_REASONS = 5


def fallback(resumed: Event) -> Event | None:
    """What a resume gives up and why; None when the newest checkpoint was taken, or the one that was asked for. Pure.

    Args:
        resumed: the trainer's event, with the plan that it acted on.
    """
    plan, step = resumed["plan"], resumed["step"]
    rejected = sorted((one for one in plan["rejections"] if one["step"] > step), key=lambda one: -one["step"])
    newest = max(step, plan["newest"] or 0, *(one["step"] for one in rejected))
    if newest == step or plan["reason"] == ASKED_FOR:
        return None
    reasons = [f"step {one['step']} ({one['source']}) rejected: {one['reason']}" for one in rejected[:MOST_REASONS]]
    if len(rejected) > MOST_REASONS:
        reasons.append(f"{len(rejected) - MOST_REASONS} more rejected")
    if (plan["newest"] or 0) > step:
        reasons.append(f"step {step} was preferred to step {plan['newest']}: {plan['reason']}")
    attempt = resumed["attempt"]
    return {"attempt": attempt, "step": step, "newest": newest, "steps_given_up": newest - step, "reasons": reasons}


def tell_fallback(run: Path, resumed: Event) -> threading.Thread:
    """Emit the event of a resume that falls back, from the running task; what fails is logged and holds nothing up."""

    def emit() -> None:
        if found := fallback(resumed):
            resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
            emit_event(FELL_BACK, resource, payload={"run": str(run), **found})

    return in_background(emit)
