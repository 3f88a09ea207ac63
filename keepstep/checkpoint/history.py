"""What the run itself has said of its checkpoints: verified, retired, confirmed by the store."""

from __future__ import annotations

from keepstep.checkpoint import layout
from keepstep.events.log import read_jsonl
from keepstep.run import RunDir, read_json


def verified_steps(run: RunDir) -> set[int]:
    """Steps that were good when they were last looked at and have not been retired since."""
    verified: set[int] = set()
    for event in read_jsonl(run.events):
        if event.get("event") == "checkpoint_verified":
            verified.add(event["step"])
        elif event.get("event") in ("checkpoint_rejected", "checkpoint_pruned") and event.get("source") != "s3":
            verified.discard(event["step"])
    return verified


def uploaded_steps(run: RunDir) -> list[int]:
    """Steps that the store has confirmed, ascending."""
    if not run.uploads.is_dir():
        return []
    return sorted(int(path.stem) for path in run.uploads.glob("*.json") if path.stem.isdecimal())


def rows_handed_out(run: RunDir) -> int | None:
    """Training rows handed out up to the newest checkpoint here that says it; None: none does."""
    for step in reversed(run.steps()):
        try:
            offset = read_json(run.checkpoint(step) / layout.TRAINER_STATE)["dataloader_state"]["train_dataset_offset"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(offset, int):
            return offset
    return None
