"""What a run left behind, each piece with the file and the line that it stands in.

Nothing here fails on a torn, garbled or missing file: what cannot be read is evidence as well.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from keepstep.attempts import Claim, flow_heartbeat, flow_run_of, judge
from keepstep.checkpoint.history import uploaded_steps
from keepstep.processes import ProcessRef, boot_id, hostname
from keepstep.run import RunDir

MAX_QUOTE = 240
"""Characters of a line that are quoted."""
LEASE_TIMEOUT_S = 90.0
"""What `retry.lease_timeout_s` is unless it is set."""
_LOGGED = re.compile(r" INFO ([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(.*)$")
_WRITTEN = re.compile(r"( *)([a-z_0-9]+): *(.*)$")


@dataclass(frozen=True)
class Quote:
    """Part of one line of a file of the run. `line` 0: the file or folder itself, `text` says what about it."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}" if self.line else f"{self.file}: {self.text}"


@dataclass(frozen=True)
class Line:
    """One line of a text file of the run."""

    file: str
    number: int
    text: str

    def quote(self, part: str | None = None) -> Quote:
        """The line from `part` on, or from its beginning."""
        start = max(self.text.find(part), 0) if part else 0
        return Quote(self.file, self.number, self.text[start : start + MAX_QUOTE].strip())


@dataclass(frozen=True)
class Setting:
    """A setting as text, and where it stands."""

    value: str
    quote: Quote


@dataclass(frozen=True)
class Row:
    """One JSON object of events.jsonl or metrics.jsonl."""

    source: Line
    value: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.text("event")

    @cached_property
    def attempt(self) -> int:
        return int(self.number("attempt") or 0)

    @cached_property
    def step(self) -> int | None:
        found = self.number("step")
        return None if found is None else int(found)

    @property
    def time(self) -> datetime | None:
        try:
            found = datetime.fromisoformat(self.text("time"))
        except ValueError:
            return None
        return found if found.tzinfo else None

    def text(self, key: str) -> str:
        """A field as text; a missing one is empty."""
        found = self.value.get(key)
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> float | None:
        """A field as a finite number; anything else is None."""
        found = self.value.get(key)
        try:
            value = float(found) if isinstance(found, int | float) and not isinstance(found, bool) else math.nan
        except OverflowError:
            return None
        return value if math.isfinite(value) else None

    def quote(self, key: str | None = None) -> Quote:
        """The field `key` alone; without one the line from the event's name on."""
        if key is None:
            return self.source.quote('"event":')
        pair = re.search(rf'"{re.escape(key)}": *[^,}}]*', self.source.text)
        return Quote(
            self.source.file, self.source.number, pair.group(0)[:MAX_QUOTE] if pair else self.source.quote().text
        )


@dataclass(frozen=True)
class Document:
    """A JSON file as a whole: run.json, result.json, attempts/<n>.json. `value` is empty when it cannot be read."""

    lines: tuple[Line, ...]
    value: dict[str, Any]

    def quote(self, part: str) -> Quote | None:
        """The first line that holds `part`."""
        return next((line.quote(part) for line in self.lines if part in line.text), None)


@dataclass(frozen=True)
class AttemptEvidence:
    """What is known of one attempt."""

    number: int
    record: Document
    events: tuple[Row, ...] = ()
    log: tuple[Line, ...] = ()
    settings: dict[str, Setting] = field(default_factory=dict)
    """What this start used, by dotted key, from its train.log; without that what the first start used."""

    @property
    def end(self) -> Row | None:
        """The event that says how it ended."""
        ends = ("failed", "preempted", "fenced", "finished")
        return next((row for row in reversed(self.events) if row.kind in ends), None)

    @property
    def outcome(self) -> dict[str, Any]:
        """{"status", "class", "message", "remedy", …}; empty while it is open."""
        found = self.record.value.get("outcome")
        if isinstance(found, dict):
            return found
        if self.end is not None:
            return {"status": self.end.kind} | {k: v for k, v in self.end.value.items() if k != "event"}
        return {}

    @property
    def failure_class(self) -> str:
        found = self.outcome.get("class")
        return found if isinstance(found, str) else ""

    @property
    def message(self) -> str:
        found = self.outcome.get("message")
        return found if isinstance(found, str) else ""

    @property
    def last_step(self) -> int | None:
        """The last step that it finished."""
        return max((row.step for row in self.events if row.kind == "step" and row.step is not None), default=None)

    def quote_end(self) -> Quote | None:
        """Where its end stands: the event, else the record."""
        if self.end is not None:
            return self.end.quote()
        return self.record.quote('"message":') or self.record.quote('"outcome":')


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules look at."""

    root: Path
    record: Document
    result: Document
    attempts: tuple[AttemptEvidence, ...]
    events: tuple[Row, ...]
    metrics: tuple[Row, ...]
    claim: Claim
    """What the newest attempt means for a new start, on this host and now."""
    now: float
    """Seconds since the epoch."""
    steps: tuple[int, ...] = ()
    """Step folders on disk, ascending."""
    quarantine: tuple[str, ...] = ()
    confirmed: tuple[int, ...] = ()
    """Steps that the store has confirmed."""
    unreadable: tuple[Quote, ...] = ()
    """Files and lines that could not be read."""

    @property
    def newest(self) -> AttemptEvidence | None:
        return self.attempts[-1] if self.attempts else None

    def of(self, kind: str) -> tuple[Row, ...]:
        """Events of one kind, oldest first."""
        return tuple(row for row in self.events if row.kind == kind)

    @property
    def total_steps(self) -> int | None:
        told = (row.number(key) for row in reversed(self.events) for key in ("total_steps", "total"))
        found = next((number for number in told if number is not None), None)
        return None if found is None else int(found)

    @property
    def step(self) -> int:
        """The last finished step of the newest attempt that finished one, or the one it resumed from."""
        known = [row.step for row in self.events if row.kind in ("step", "resumed") and row.step is not None]
        return known[-1] if known else 0

    @property
    def verified(self) -> int | None:
        """The newest step on disk that was good when it was last looked at."""
        good: set[int] = set()
        for row in self.events:
            if row.step is None or row.text("source") == "s3":
                continue
            if row.kind == "checkpoint_verified":
                good.add(row.step)
            elif row.kind in ("checkpoint_rejected", "checkpoint_pruned"):
                good.discard(row.step)
        return max(good & set(self.steps), default=None)

    @property
    def finished(self) -> bool:
        """Whether the newest attempt reached the last step."""
        return self.newest is not None and self.newest.outcome.get("status") == "finished"

    @property
    def at_work(self) -> bool:
        return self.claim.kind == "held"


def gather(
    run: RunDir,
    *,
    now: float | None = None,
    host: str | None = None,
    boot: str | None = None,
    alive: Callable[[ProcessRef], bool] = ProcessRef.alive,
) -> Evidence:
    """Read a run's folder. The time and this machine may be handed in; by default they are what they are."""
    unreadable: list[Quote] = []
    now = time.time() if now is None else now
    events = tuple(_rows(run, run.events, unreadable))
    written = _written_settings(_lines(run, run.config, unreadable))
    attempts = tuple(_attempt(run, number, events, written, unreadable) for number in run.attempt_numbers())
    newest = attempts[-1].record.value if attempts else None
    lease_timeout_s = _lease_timeout_s(attempts[-1]) if attempts else LEASE_TIMEOUT_S
    return Evidence(
        root=run.root,
        record=_document(run, run.record, unreadable),
        result=_document(run, run.result, unreadable),
        attempts=attempts,
        events=events,
        metrics=tuple(_rows(run, run.metrics, unreadable)),
        claim=_claim(run, newest, now, host or hostname(), boot_id() if boot is None else boot, lease_timeout_s, alive),
        now=now,
        steps=tuple(run.steps()),
        quarantine=tuple(sorted(path.name for path in run.quarantine.glob("*"))),
        confirmed=tuple(uploaded_steps(run)),
        unreadable=tuple(unreadable),
    )


def _attempt(
    run: RunDir, number: int, events: tuple[Row, ...], written: dict[str, Setting], unreadable: list[Quote]
) -> AttemptEvidence:
    log = tuple(_lines(run, run.train_log(number), unreadable))
    record = _document(run, run.attempt(number), unreadable)
    own = tuple(row for row in events if row.attempt == number)
    return AttemptEvidence(number, record, own, log, _logged_settings(log) or written)


def _logged_settings(log: Iterable[Line]) -> dict[str, Setting]:
    """The dotted `key=value` lines with which an attempt begins its log."""
    found = ((line, _LOGGED.search(line.text)) for line in log)
    return {match[1]: Setting(match[2], line.quote(match[1])) for line, match in found if match}


def _written_settings(lines: Iterable[Line]) -> dict[str, Setting]:
    """Settings of a config.yaml as this program writes it: sections by indentation, one setting a line."""
    found: dict[str, Setting] = {}
    sections: list[tuple[int, str]] = []
    for line in lines:
        match = _WRITTEN.match(line.text)
        if match is None:
            continue
        sections = [section for section in sections if section[0] < len(match[1])]
        if match[3]:
            found[".".join([*(name for _, name in sections), match[2]])] = Setting(match[3], line.quote(match[2]))
        else:
            sections.append((len(match[1]), match[2]))
    return found


def _lease_timeout_s(attempt: AttemptEvidence) -> float:
    found = attempt.settings.get("retry.lease_timeout_s")
    try:
        return float(found.value) if found else LEASE_TIMEOUT_S
    except ValueError:
        return LEASE_TIMEOUT_S


def _claim(
    run: RunDir, record: dict[str, Any] | None, now: float, host: str, boot: str, timeout_s: float,
    alive: Callable[[ProcessRef], bool],
) -> Claim:  # fmt: skip
    if record == {}:
        return Claim("unknown", "the newest attempt's record cannot be read")
    try:
        heard = flow_heartbeat(run, record["attempt"]) if record else None
        return judge(
            record, alive=alive, now=now, host=host, boot=boot, lease_timeout_s=timeout_s, flow_heartbeat=heard,
            flow_run=lambda: flow_run_of(run, record["attempt"]) if record else None,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError):
        return Claim("unknown", "the newest attempt's record is not whole")


def _lines(run: RunDir, path: Path, unreadable: list[Quote]) -> Iterator[Line]:
    """Lines of a text file as an editor counts them; a missing file has none."""
    name = str(path.relative_to(run.root))
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        unreadable.append(Quote(name, 0, error.strerror or type(error).__name__))
        return
    for number, text in enumerate(data.decode(errors="replace").split("\n"), 1):
        yield Line(name, number, text)


def _rows(run: RunDir, path: Path, unreadable: list[Quote]) -> Iterator[Row]:
    for line in _lines(run, path, unreadable):
        value = _parse(line.text)
        if value is not None:
            yield Row(line, value)
        elif line.text.strip():
            unreadable.append(line.quote())


def _document(run: RunDir, path: Path, unreadable: list[Quote]) -> Document:
    lines = tuple(_lines(run, path, unreadable))
    value = _parse("\n".join(line.text for line in lines))
    if value is None and lines:
        unreadable.append(Quote(lines[0].file, 0, "not a JSON object"))
    return Document(lines, value or {})


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_run(run: RunDir) -> bool:
    """Whether a folder is, or was, one of ours: its record, or what a torn one leaves."""
    return run.has_record() or (run.root.is_dir() and bool(run.attempt_numbers()) and run.events.is_file())
