"""What became of a run's attempts and checkpoints, from its evidence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest

from keepstep.doctor.ends import made_good
from keepstep.doctor.evidence import AttemptEvidence, Evidence, Row

RUNNING, KILLED = "running", "killed"


@dataclass(frozen=True)
class Rewind:
    """Steps that were finished and are to be trained again, since training went on from an earlier one."""

    attempt: int
    """Which had trained them."""
    after: int
    """The last step before it went back."""
    to: int
    """The step from which it went on."""

    @property
    def num_steps(self) -> int:
        return self.after - self.to


@dataclass(frozen=True)
class AttemptLife:
    """One attempt from its start to its end."""

    number: int
    end: str
    """finished, preempted, failed, fenced, running, or killed: it left no word."""
    failure_class: str
    message: str
    host: str
    began: datetime | None
    ended: datetime | None
    """For a running one: now; for a killed one: its last sign of life."""
    first_step: int | None
    last_step: int | None
    num_steps: int
    """Steps that it finished, those it trained twice counted twice."""
    num_lost: int
    """Of them, those that a later start had to train again."""
    replaced: tuple[str, ...]
    """Roles that died and were replaced within it."""
    until_next_step_s: float | None
    """From its end to the next attempt's first step."""

    @property
    def lasted_s(self) -> float | None:
        return (self.ended - self.began).total_seconds() if self.began and self.ended else None


@dataclass
class CheckpointLife:
    """What happened to the checkpoint of one step; of each kind of event the last."""

    step: int
    saved: Row | None = None
    verified: Row | None = None
    uploaded: Row | None = None
    pruned: Row | None = None
    rejected: Row | None = None
    skipped: Row | None = None
    marks: list[str] = field(default_factory=list)
    """latest, best, pinned."""
    on_disk: bool = False
    in_store: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it was good when it was last looked at."""
        return self.verified is not None and (
            self.rejected is None or self.verified.source.number > self.rejected.source.number
        )


_LIFE = {
    "checkpoint_saved": "saved", "checkpoint_verified": "verified", "checkpoint_uploaded": "uploaded",
    "checkpoint_pruned": "pruned", "checkpoint_rejected": "rejected", "checkpoint_skipped": "skipped",
}  # fmt: skip


def rewinds(events: Sequence[Row]) -> tuple[Rewind, ...]:
    """Every place where a step was finished that is not above the one finished before it."""
    found = []
    last: Row | None = None
    for row in events:
        if row.kind != "step" or row.step is None:
            continue
        if last is not None and last.step is not None and row.step <= last.step:
            found.append(Rewind(last.attempt, last.step, row.step - 1))
        last = row
    return tuple(found)


def attempts(evidence: Evidence) -> tuple[AttemptLife, ...]:
    """Every attempt that is on record, in their order."""
    lost = Counter[int]()
    for rewind in rewinds(evidence.events):
        lost[rewind.attempt] += rewind.num_steps
    followed = zip_longest(evidence.attempts, evidence.attempts[1:])
    return tuple(_attempt(evidence, attempt, lost[attempt.number], after) for attempt, after in followed)


def _attempt(evidence: Evidence, own: AttemptEvidence, num_lost: int, after: AttemptEvidence | None) -> AttemptLife:
    end = str(own.outcome.get("status") or "")
    if not end:
        end = RUNNING if after is None and evidence.at_work else KILLED
    steps = [row.step for row in own.events if row.kind == "step" and row.step is not None]
    times = [row.time for row in own.events if row.time is not None]
    ended = _ended(evidence, own, end, times)
    next_steps = [row.time for row in after.events if row.kind == "step" and row.time] if after else []
    owner = own.record.value.get("owner")
    return AttemptLife(
        number=own.number,
        end=end,
        failure_class=own.failure_class,
        message=own.message,
        host=str(owner.get("host", "")) if isinstance(owner, dict) else "",
        began=times[0] if times else None,
        ended=ended,
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        num_steps=len(steps),
        num_lost=num_lost,
        replaced=tuple(row.text("role") for row in made_good(own.events)),
        until_next_step_s=(next_steps[0] - ended).total_seconds() if next_steps and ended else None,
    )


def _ended(evidence: Evidence, own: AttemptEvidence, end: str, times: Sequence[datetime]) -> datetime | None:
    if end == RUNNING:
        return from_epoch(evidence.now)
    if own.end is not None and own.end.time is not None:
        return own.end.time
    heartbeat = own.record.value.get("heartbeat")
    heard = from_epoch(heartbeat) if isinstance(heartbeat, int | float) else None
    return max([*times[-1:], *([heard] if heard else [])], default=None)


def checkpoints(
    evidence: Evidence, *, pinned: frozenset[int] = frozenset(), latest: int | None = None, best: int | None = None
) -> tuple[CheckpointLife, ...]:
    """Every step that was ever saved, skipped, or stands somewhere; ascending."""
    found: dict[int, CheckpointLife] = {}
    for row in evidence.events:
        name = _LIFE.get(row.kind)
        if name is None or row.step is None:
            continue
        life = found.setdefault(row.step, CheckpointLife(row.step))
        if row.text("source") != "s3" or name == "uploaded":
            setattr(life, name, row)
    for step in (*evidence.steps, *evidence.confirmed):
        found.setdefault(step, CheckpointLife(step))
    for step, life in found.items():
        names = (("latest", step == latest), ("best", step == best), ("pinned", step in pinned))
        life.marks = [name for name, given in names if given]
        life.on_disk, life.in_store = step in evidence.steps, step in evidence.confirmed
    return tuple(found[step] for step in sorted(found))


def from_epoch(seconds: float) -> datetime | None:
    """A point in time; None for what no calendar holds."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
