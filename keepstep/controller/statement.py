"""What an attempt says of itself before its first step. Pure: facts in, sentences out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.plan import ResumePlan

Record = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """How a resumed attempt stands."""

    total_steps: int
    step: int
    folder: str
    epoch: int
    num_rows: int
    """Rows of the training set after caps and filters."""
    next_row: int
    """Rows handed out since the run began."""
    lr_last: float | None
    """Learning rate of the last finished step; None where the checkpoint does not say."""
    lr_next: float
    optimizer_step: int
    num_without_moments: int
    num_ranks: int
    num_saved_streams: int
    streams_restored: bool
    has_cuda: bool
    probe_gap: float | None
    """Largest difference of a probe token's log-prob; None where the checkpoint has no probe."""

    def to_record(self) -> Record:
        """Fields of the event."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "next_row": self.next_row,
            "lr": self.lr_next,
            "optimizer_step": self.optimizer_step,
            "num_without_moments": self.num_without_moments,
            "streams_restored": self.streams_restored,
            # JSON has no infinity.
            "probe_gap": self.probe_gap if self.probe_gap is None or math.isfinite(self.probe_gap) else "inf",
        }


def sentences(facts: Facts, plan: ResumePlan) -> list[str]:
    """The first lines of a resumed attempt's log."""
    lines = [
        f"resumed at step {facts.step:,} of {facts.total_steps:,} from {facts.folder} ({choice(plan)})",
        f"epoch {facts.epoch}, next row {facts.next_row:,} of the run: row {facts.next_row % facts.num_rows:,} of "
        f"{facts.num_rows:,} in this epoch",
        learning_rate(facts),
        optimizer(facts),
        streams(facts),
        "engine: its state is never restored; it gets the policy's weights as version "
        f"{facts.step} before the first rollout",
        probe(facts),
    ]
    if finished := schedule_finished(facts):
        lines.append(finished)
    return lines


def debug_lines(facts: Facts) -> list[str]:
    """The three lines of `trainer.debug`, which come before the others."""
    return [
        f"[DEBUG] Resuming from step {facts.step}, epoch {facts.epoch}",
        f"[DEBUG] Loaded actor optimizer with step {facts.optimizer_step}",
        f"[DEBUG] Dataloader offset set to {facts.next_row}",
    ]


def choice(plan: ResumePlan) -> str:
    """Why this checkpoint, and what that gives up."""
    state = "its reference was damaged and is mended" if plan.repair else "verified"
    if plan.rebuild_scheduler:
        state += ", its scheduler is rebuilt at the global step"
    source = ", fetched from the store" if plan.source == "s3" else ""
    lost = f"; newest is {plan.newest}: {plan.steps_given_up} steps given up" if plan.steps_given_up else ""
    return f"{state}{source}, {plan.reason}{lost}"


def learning_rate(facts: Facts) -> str:
    last = "" if facts.lr_last is None else f"{facts.lr_last:g} in step {facts.step}, "
    return f"learning rate: {last}{facts.lr_next:g} in step {facts.step + 1}"


def optimizer(facts: Facts) -> str:
    without = facts.num_without_moments
    missing = f"; {without} parameters never got a gradient and begin with fresh moments" if without else ""
    return f"optimizer: moments restored at its step {facts.optimizer_step}{missing}"


def streams(facts: Facts) -> str:
    names = "python, numpy, torch" + (", cuda" if facts.has_cuda else "")
    always = "order of rows and sampling are functions of the seed and the step"
    if facts.streams_restored:
        return f"random streams restored on {facts.num_ranks} ranks: {names}; {always}"
    return (
        f"random streams NOT restored ({names}): saved by {facts.num_saved_streams} ranks, now {facts.num_ranks}; "
        f"{always}"
    )


def probe(facts: Facts) -> str:
    if facts.probe_gap is None:
        return "probe: the checkpoint has none (an older release wrote it, or no prompt has two tokens)"
    return f"probe: the same prompts have the log-probs of the save (largest difference {facts.probe_gap:.3g})"


def schedule_finished(facts: Facts) -> str | None:
    """A run that goes on after its schedule ended trains nothing, and looks as if all were well."""
    if facts.lr_next > 0 or facts.step >= facts.total_steps:
        return None
    return (
        f"WARNING: the learning rate is 0 from step {facts.step + 1} on: the schedule finished at step {facts.step}, "
        "further steps change no weight"
    )
