"""Where the run goes on: the plan under the settings of this start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep import waivers
from keepstep.checkpoint.plan import Rejection, ResumePlan, plan
from keepstep.checkpoint.verify import verify
from keepstep.config.schema import RunConfig
from keepstep.errors import CheckpointError
from keepstep.run import RunDir

Record = dict[str, Any]


def make_plan(
    config: RunConfig,
    run: RunDir,
    remote: Any,
    existing: Record | None,
    total_steps: int | None,
    passed_over: Sequence[Rejection] = (),
) -> ResumePlan:
    """Where the run goes on; every candidate that is passed over is verified or named.

    Raises:
        CheckpointError: steps exist and none is usable, or the one that was asked for is not.
    """
    asked = config.trainer.resume_from_checkpoint
    return plan(
        run,
        policy=config.resume.policy,
        prefer_multiple=config.resume.prefer_multiple,
        max_rewind_steps=config.resume.max_rewind_steps,
        remote=remote,
        expected_run_id=existing["run_id"] if existing else None,
        only_step=asked_step(run, asked) if asked else None,
        final_step=total_steps,
        passed_over=passed_over,
        without_scheduler=waivers.SCHEDULER in config.resume.allow,
    )


def asked_step(run: RunDir, asked: str) -> int:
    """The step that `trainer.resume_from_checkpoint` names: a good checkpoint of this run, nothing else.

    Raises:
        CheckpointError: with what is wrong with it.
    """
    folder = Path(os.path.realpath(asked))
    if folder == Path(os.path.realpath(run.checkpoints)) or folder == Path(os.path.realpath(run.root)):
        raise CheckpointError(
            f"trainer.resume_from_checkpoint: {asked} holds all checkpoints.",
            f"Name one of them: keepstep ls {run.root}",
        )
    found = verify(folder)
    reason = found.reasons[0] if found.reasons else ""
    if not reason and folder.parent != Path(os.path.realpath(run.checkpoints)):
        reason = f"it is not one of {run.checkpoints}"
    if reason or not found.resumable or found.step is None:
        raise CheckpointError(
            f"trainer.resume_from_checkpoint: {asked} cannot be resumed from: {reason or found.state}.",
            f"See what can: keepstep plan {run.root}",
        )
    return found.step
