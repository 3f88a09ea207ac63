"""An audit of a run: every checkpoint verified, on disk and in the store, and retention applied to what is good.

It is for runs that lie there: bytes rot, buckets are cleaned by others, and nobody would notice before the next resume.
What it finds it tells; it moves and mends nothing, which a resume does. A run that an attempt holds is looked at as
well, but retention is left to that attempt. Light half: the store's libraries are imported where one is asked.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.attempts import check_fence, claim
from keepstep.checkpoint.history import uploaded_steps
from keepstep.checkpoint.inventory import decide_for, is_confirmed, waiting_steps
from keepstep.checkpoint.inventory import retire as retire_on_disk
from keepstep.checkpoint.verify import Verdict, verify
from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.errors import FencedError
from keepstep.events.log import EventLog
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, read_json

if TYPE_CHECKING:
    from keepstep.storage.remote import RemoteRun

DISK, STORE = "disk", "store"
DAMAGED, INCOMPLETE, GOOD = AUDIT_ENDS = ("DamagedCheckpoints", "AuditIncomplete", "Completed")
"""How an audit of several runs ends."""


@dataclass(frozen=True)
class Look:
    """One checkpoint at one place."""

    step: int
    place: str
    num_bytes: int
    problems: list[str]
    """Empty: it is good."""


@dataclass(frozen=True)
class RunAudit:
    """What was found of one run, and what retention deleted."""

    run: str
    looks: list[Look]
    retired: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "place", "reason"} each."""
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[Look]:
        return [look for look in self.looks if look.problems]


def find_runs(patterns: Sequence[str]) -> tuple[list[RunDir], list[str]]:
    """(the runs that folders and globs name, each once; one sentence for each folder that is named and is no run).

    What a glob finds that is no run is passed over.
    """
    found: dict[Path, RunDir] = {}
    problems = []
    for pattern in patterns:
        named = not glob.has_magic(pattern)
        for path in [pattern] if named else sorted(glob.glob(os.path.expanduser(pattern))):
            run = RunDir.at(path)
            if run.has_record():
                found.setdefault(run.root, run)
            elif named:
                problems.append(f"{run.root} is no run: it has no run.json")
    return list(found.values()), problems


def audit(run: RunDir) -> RunAudit:
    """Look at every checkpoint of a run, then apply its own retention rules to the good ones.

    Raises:
        ConfigError, DamagedFileError: the run's own config.yaml or records cannot be read.
        StorageError: the store did not answer; nothing is said of its checkpoints then, and nothing was deleted.
    """
    config = load(str(run.config))
    looks = look_at_disk(run)
    if not config.s3_enabled:
        retired, notes = _retire(run, config, looks, None)
        return RunAudit(str(run.root), looks, retired, notes)
    with _store(config, run) as remote:
        looks += look_at_store(config, run, remote)
        retired, notes = _retire(run, config, looks, remote)
    return RunAudit(str(run.root), looks, retired, notes)


def look_at_disk(run: RunDir) -> list[Look]:
    """Every published step, read in full. One that is retired meanwhile is no finding."""
    run_id = read_json(run.record)["run_id"]
    looks = []
    for step in run.steps():
        found = verify(run.checkpoint(step), expected_run_id=run_id, expected_step=step)
        if found.resumable or run.checkpoint(step).is_dir():
            looks.append(_look(step, DISK, found))
    return looks


def look_at_store(config: RunConfig, run: RunDir, remote: RemoteRun) -> list[Look]:
    """Every step with a manifest, object by object, and those that were confirmed once and are not there any more.

    An attempt may upload and retire meanwhile; what it retires loses its record first, then its manifest.
    """
    confirmed = [step for step in uploaded_steps(run) if is_confirmed(config, run, step)]
    stored = remote.steps()
    looks = []
    for step in stored:
        found = remote.verify(step)
        if found.resumable or remote.manifest_bytes(step) is not None:
            looks.append(_look(step, STORE, found))
    lost = "the store had confirmed it, and has no manifest of it now"
    looks += [Look(step, STORE, 0, [lost]) for step in confirmed if step not in stored and run.upload(step).is_file()]
    return sorted(looks, key=lambda look: look.step)


def conclude(audits: Sequence[RunAudit], unanswered: Sequence[str]) -> tuple[str, str]:
    """(how the audit ends, one sentence). Pure. Damage weighs more than a store that could not be asked.

    Args:
        unanswered: one sentence for each run that could not be audited.
    """
    bad = [(audit, look) for audit in audits for look in audit.bad]
    if bad:
        first, look = bad[0]
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return DAMAGED, f"{first.run}: step {look.step} on the {look.place}: {look.problems[0]}{more}"
    if unanswered:
        return INCOMPLETE, unanswered[0]
    return GOOD, f"{sum(len(audit.looks) for audit in audits)} checkpoints of {len(audits)} runs are good"


def report(audits: Sequence[RunAudit], unanswered: Sequence[str]) -> str:
    """Markdown: a table of all checkpoints, what is wrong, what retention did."""
    rows = ["| run | step | where | bytes | |", "|---|---|---|---|---|"]
    rows += [
        f"| {audit.run} | {look.step} | {look.place} | {look.num_bytes:,} | {'damaged' if look.problems else 'good'} |"
        for audit in audits
        for look in audit.looks
    ]
    wrong = [
        f"- {audit.run}, step {look.step} on the {look.place}: {'; '.join(look.problems)}"
        for audit in audits
        for look in audit.bad
    ]
    retired = [
        f"- {audit.run}: step {entry['step']} deleted from the {entry['place']}: {entry['reason']}"
        for audit in audits
        for entry in audit.retired
    ]
    notes = [f"- {audit.run}: {note}" for audit in audits for note in audit.notes]
    remedy = [
        "",
        "A resume sets a damaged checkpoint aside and takes the next good one: `keepstep plan RUN` shows which.",
    ]
    parts = [("Damaged", wrong + remedy if wrong else []), ("Not audited", [f"- {text}" for text in unanswered])]
    parts += [("Retention", retired), ("Notes", notes)]
    sections = [f"## {title}\n\n" + "\n".join(lines) for title, lines in parts if lines]
    return "\n\n".join([conclude(audits, unanswered)[1], *sections, "## Checkpoints\n\n" + "\n".join(rows)])


def _look(step: int, place: str, found: Verdict) -> Look:
    return Look(step, place, found.num_bytes, [] if found.resumable else found.reasons or [found.state])


@contextmanager
def _store(config: RunConfig, run: RunDir) -> Iterator[RemoteRun]:
    """The run's side of the store; the embedded one is started for as long as it is looked at."""
    from keepstep.platform import servers
    from keepstep.storage.remote import open_remote

    holder = ProcessRef.current("audit")
    environment = servers.object_store(run.platform, holder).env if config.s3.embedded else {}
    try:
        with closing(open_remote(config.s3, run, environment)) as remote:
            yield remote
    finally:
        if config.s3.embedded:
            servers.release(run.platform, holder)


def _retire(
    run: RunDir, config: RunConfig, looks: list[Look], remote: RemoteRun | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Apply the rules to the good checkpoints; ({"step", "place", "reason"} of those deleted, notes)."""
    newest = max(run.attempt_numbers(), default=0)
    held = claim(run, newest, config.retry.lease_timeout_s)
    if not held.open:
        return [], [f"{held.reason}; retention is left to it"]
    retired: list[dict[str, Any]] = []
    notes: list[str] = []
    events = EventLog(run.events, newest)

    def tell(step: int, reason: str, place: str) -> None:
        # Events know the store by another word.
        events.emit("checkpoint_pruned", step=step, reason=reason, **({"source": "s3"} if place == STORE else {}))
        retired.append({"step": step, "place": place, "reason": reason})

    try:
        _retire_from_disk(run, config, looks, lambda step, reason: tell(step, reason, DISK))
        if remote is not None and config.s3.keep_remote == "retention":
            if any(look.problems for look in looks):
                # A damaged one may be what a rule counts as the newest or the best.
                notes.append("nothing was deleted from the store while something is damaged")
            else:
                try:
                    _retire_from_store(run, config, remote, lambda step, reason: tell(step, reason, STORE))
                except FencedError as error:
                    notes.append(f"nothing more was deleted from the store: {error.message}")
    finally:
        events.close()
    return retired, notes


def _retire_from_disk(run: RunDir, config: RunConfig, looks: list[Look], tell: Any) -> None:
    record = read_json(run.record)
    newest = max(run.attempt_numbers(), default=0)
    decision = decide_for(
        run,
        config.checkpoint,
        run_id=record["run_id"],
        # What was just read, not what was good once: a damaged one must not push a good one out.
        verified=[look.step for look in looks if look.place == DISK and not look.problems],
        waiting=frozenset(waiting_steps(config, run, record["contract"]["trainer.total_training_steps"])),
        in_use=frozenset(),
    )
    retire_on_disk(run, decision, lambda: check_fence(run, newest), tell)


def _retire_from_store(run: RunDir, config: RunConfig, remote: RemoteRun, tell: Any) -> None:
    from keepstep.storage import lease
    from keepstep.storage.retire import retire

    newest = max(run.attempt_numbers(), default=0)
    run_id = read_json(run.record)["run_id"]

    def fence() -> None:
        check_fence(run, newest)
        # This folder may be one that a machine has left behind whose run goes on elsewhere.
        lease.check(remote.store, run, newest)

    retire(remote, run, run_id, config.checkpoint, fence, tell)
