"""The resume decision: every candidate here and in the store, verified in order of preference until one holds.

The plan changes nothing. It never trusts `latest`, and it never answers "step 0" when step folders exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from keepstep.checkpoint import layout
from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.select import Candidate, order
from keepstep.checkpoint.verify import REJECTED, Verdict, verify
from keepstep.errors import CheckpointError
from keepstep.events.log import Event, read_jsonl
from keepstep.run import RunDir


class RemoteIndex(Protocol):
    """What the plan asks of the store's side of a run (`storage.remote.RemoteRun`)."""

    def steps(self) -> list[int]: ...

    def verify(self, step: int) -> Verdict: ...


@dataclass(frozen=True)
class Rejection:
    step: int
    source: str
    reason: str


@dataclass
class ResumePlan:
    """Where to go on. `step` None: nothing was ever saved, the run begins at step 0."""

    step: int | None = None
    source: str | None = None
    reason: str = "nothing was saved yet"
    newest: int | None = None
    """Newest step that stands anywhere."""
    steps_given_up: int = 0
    repair: bool = False
    """Only its reference is damaged, which other places hold as well: it is mended before anything is loaded."""
    rebuild_scheduler: bool = False
    """Its scheduler alone is lost, and this start has accepted to rebuild it at the global step."""
    avoided_multiple: int | None = None
    """A multiple that lost its precedence because attempts kept beginning there."""
    rejections: list[Rejection] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        """Sentences for a person."""
        lines = [f"step {r.step} ({r.source}) rejected: {r.reason}" for r in self.rejections]
        if self.step is None:
            return [*lines, f"begins at step 0: {self.reason}"]
        lost = f"; newest is {self.newest}: {self.steps_given_up} steps given up" if self.steps_given_up else ""
        state = "its reference is damaged and will be mended" if self.repair else "verified"
        state += ", its scheduler is lost and rebuilt at the global step" if self.rebuild_scheduler else ""
        return [*lines, f"resumes at step {self.step} ({self.source}, {state}, {self.reason}{lost})"]


def plan(
    run: RunDir,
    *,
    policy: str,
    prefer_multiple: int,
    max_rewind_steps: int | None,
    remote: RemoteIndex | None = None,
    expected_run_id: str | None = None,
    only_step: int | None = None,
    final_step: int | None = None,
    passed_over: Sequence[Rejection] = (),
    without_scheduler: bool = False,
) -> ResumePlan:
    """Decide where the run goes on.

    Args:
        without_scheduler: a checkpoint here that lacks nothing but its scheduler will do.
        only_step: consider this step alone (it was named on the command line).
        final_step: the run's last step; standing and verified, it leaves nothing to train.
        passed_over: candidates that verified and turned out to be unusable when they were fetched.

    Raises:
        CheckpointError: steps exist, or the run has verified some, and none is usable; the message has every reason.
        StorageError: the store stopped answering half-way.
    """
    candidates = [Candidate(step, "local") for step in run.steps()]
    candidates += [Candidate(step, "s3") for step in (remote.steps() if remote else [])]
    there = [candidate.step for candidate in candidates]
    if only_step is not None:
        candidates = [candidate for candidate in candidates if candidate.step == only_step]
    stuck_at = find_stuck(list(read_jsonl(run.events)), prefer_multiple)
    ordered = order(
        candidates,
        policy=policy,
        prefer_multiple=prefer_multiple,
        max_rewind_steps=max_rewind_steps,
        stuck_at=stuck_at,
        final_step=final_step,
    )
    known_bad = {(rejection.step, rejection.source) for rejection in passed_over}
    ordered = [entry for entry in ordered if (entry[0].step, entry[0].source) not in known_bad]
    found = ResumePlan(candidates=[candidate for candidate, _ in ordered], rejections=list(passed_over))
    usable: dict[Candidate, bool] = {}
    for candidate, reason in ordered:
        verdict = _verify(run, candidate, remote, expected_run_id)
        repairable = candidate.source == "local" and only_damaged(verdict, f"{layout.REF_DIR}/")
        # The last step has nothing left to train, so nothing would be saved with a scheduler again.
        may_rebuild = without_scheduler and candidate.source == "local" and candidate.step != final_step
        rebuildable = may_rebuild and only_damaged(verdict, f"{layout.SCHEDULER}: ")
        usable[candidate] = verdict.resumable or repairable or rebuildable
        if not usable[candidate]:
            reasons = "; ".join(verdict.reasons) or verdict.state
            found.rejections.append(Rejection(candidate.step, candidate.source, reasons))
            continue
        found.step, found.source, found.reason = candidate.step, candidate.source, reason
        found.repair, found.rebuild_scheduler = repairable, rebuildable
        if only_step is not None:
            found.reason, found.newest = "asked for", max(there)
            found.steps_given_up = found.newest - candidate.step
            return found
        found.newest = max(step for step in (c.step for c in candidates if usable.get(c, True)))
        found.steps_given_up = found.newest - candidate.step
        if stuck_at is not None and candidate.step % prefer_multiple:
            found.avoided_multiple = stuck_at
        return found
    if candidates:
        reasons = "\n".join(f"  step {r.step} ({r.source}): {r.reason}" for r in found.rejections)
        raise CheckpointError(
            f"{run.root} has {len(candidates)} checkpoints and none can be resumed from:\n{reasons}",
            "Bring a good one back, or start a new run in another trainer.output_dir; this one is not started over."
            + _scheduler_hint(found.rejections),
        )
    saved = sorted({*verified_steps(run), *uploaded_steps(run)})
    if saved:
        raise CheckpointError(
            f"{run.root} has saved step {saved[-1]}, and neither the folder nor the store has a checkpoint now.",
            "Bring one back, or start a new run in another trainer.output_dir; this one is not started over.",
        )
    return found


def only_damaged(verdict: Verdict, where: str) -> bool:
    """Whether everything that is wrong with a checkpoint of ours stands in files whose names begin with `where`.

    `ref/` is the same in every step, and the scheduler is a function of the step: both can be had elsewhere.
    """
    return verdict.manifest is not None and bool(verdict.reasons) and all(r.startswith(where) for r in verdict.reasons)


def find_stuck(events: list[Event], prefer_multiple: int) -> int | None:
    """The multiple at which the last attempt that resumed began, or which it passed over already. Pure."""
    for event in reversed(events):
        if event.get("event") == "resumed":
            if event["step"] and event["step"] % prefer_multiple == 0:
                return int(event["step"])
            return event.get("plan", {}).get("avoided_multiple")
    return None


def _scheduler_hint(rejections: list[Rejection]) -> str:
    """The way out where a scheduler is all that is missing."""
    lost = [rejection.step for rejection in rejections if rejection.reason.startswith(f"{layout.SCHEDULER}: ")]
    if not lost:
        return ""
    return f" Of step {lost[0]} the scheduler is lost: resume.allow=[scheduler] rebuilds it at the global step."


def _verify(run: RunDir, candidate: Candidate, remote: RemoteIndex | None, run_id: str | None) -> Verdict:
    if candidate.source == "s3":
        assert remote is not None, "store candidates come from a store"
        verdict = remote.verify(candidate.step)
        if verdict.manifest is not None and run_id is not None and verdict.manifest.run_id != run_id:
            foreign = f"manifest.json: belongs to run {verdict.manifest.run_id}, expected {run_id}"
            return replace(verdict, state=REJECTED, reasons=[foreign, *verdict.reasons])
        return verdict
    return verify(run.checkpoint(candidate.step), expected_run_id=run_id, expected_step=candidate.step)
