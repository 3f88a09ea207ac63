"""The end of a run: last upload confirmed, final step verified, result.json written."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from keepstep.checkpoint.history import uploaded_steps
from keepstep.checkpoint.inventory import is_confirmed
from keepstep.controller.session import Session
from keepstep.errors import CheckpointError, StorageError
from keepstep.events.log import last_step_rows, read_jsonl, utc_now
from keepstep.run import RunDir, write_json

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


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
