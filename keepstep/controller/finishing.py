"""The end of a run: last upload confirmed, final step verified, result.json written."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.cadence import upload_due
from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.config.schema import RunConfig
from keepstep.errors import CheckpointError, StorageError
from keepstep.events.log import last_step_rows, read_jsonl, utc_now
from keepstep.platform import servers
from keepstep.run import RunDir, read_json, write_json

if TYPE_CHECKING:
    from keepstep.controller.session import Session

Record = dict[str, Any]
NUM_REWARDS = 10


def finish(session: Session) -> Record:
    """Wait for the store, then write and return result.json.

    Raises:
        StorageError: the store did not confirm the last upload.
        CheckpointError: the run did not reach its last step.
    """
    total_steps, run = session.start.total_steps, session.run
    if not run.checkpoint(total_steps).is_dir():
        raise CheckpointError(
            f"The run ended without a checkpoint of its last step {total_steps}.", f"See {run.events}."
        )
    from keepstep.export.hugging_face import check_exportable

    check_exportable(run.checkpoint(total_steps))
    if session.uploader is not None:
        session.uploader.drain(session.config.s3.final_timeout_s)
        if not is_confirmed(session.config, run, total_steps):
            raise StorageError(f"The store has not confirmed step {total_steps}.", "Start the same command again.")
    record = build_result(run, total_steps)
    session.attempt.check()
    write_json(run.result, record)
    return record


def build_result(run: RunDir, total_steps: int) -> Record:
    """result.json from what the run has on disk."""
    events = list(read_jsonl(run.events))
    rows = last_step_rows(run.events)
    rewards = [rows[step]["reward"] for step in sorted(rows)]
    num_trained = sum(event.get("event") == "step" for event in events)
    begin = datetime.fromisoformat(events[0]["time"]) if events else datetime.fromisoformat(utc_now())
    return {
        "final_step": total_steps,
        "target_step": total_steps,
        "final_checkpoint": str(run.checkpoint(total_steps)),
        "attempts": run.attempt_numbers()[-1],
        "steps_trained": num_trained,
        "steps_lost": num_trained - len(rows),
        "uploaded": max(uploaded_steps(run), default=None),
        "reward_first10": _mean(rewards[:NUM_REWARDS]),
        "reward_last10": _mean(rewards[-NUM_REWARDS:]),
        "wall_s": round((datetime.fromisoformat(utc_now()) - begin).total_seconds(), 3),
    }


def pending_uploads(config: RunConfig, run: RunDir, total_steps: int) -> list[int]:
    """Verified steps on disk that belong into the store and are not confirmed to be there, oldest first."""
    verified = verified_steps(run)
    return [
        step
        for step in run.steps()
        if step in verified
        and not is_confirmed(config, run, step)
        and upload_due(
            step,
            save_freq=config.trainer.save_freq,
            upload_interval=config.s3.upload_interval,
            last_step=total_steps,
        )
    ]


def is_confirmed(config: RunConfig, run: RunDir, step: int) -> bool:
    """Whether the store that is configured now has confirmed this step."""
    if not run.upload(step).is_file():
        return False
    record = read_json(run.upload(step))
    here = (config.s3.bucket or servers.BUCKET, config.s3.prefix or run.default_s3_prefix)
    return (record["bucket"], record["prefix"]) == here


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
