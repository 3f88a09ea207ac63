"""`keepstep ps RUN`: who works for a run. Light; it looks at the run's own records and at /proc, never at names."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from keepstep.attempts import Claim, claim, leftovers
from keepstep.cli.inspect_commands import existing_run
from keepstep.doctor.evidence import LEASE_TIMEOUT_S
from keepstep.errors import EXIT_DONE
from keepstep.processes import ProcessRef, hostname, rss_bytes
from keepstep.run import RunDir, read_json

HEAD = ("attempt", "role", "rank", "pid", "host", "alive", "since", "memory", "heard")
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Worker:
    """One process of an attempt, as it is now."""

    attempt: int | None
    """None: of which attempt only the mark in its environment knows."""
    role: str
    rank: int | None
    pid: int
    host: str
    alive: bool | None
    """None: it is on another host, and cannot be asked from here."""
    since: str | None
    """ISO 8601, UTC; of living processes of this host."""
    memory_bytes: int | None
    """Resident; of living processes of this host."""
    heard_s: float | None
    """Seconds since its last heartbeat, of those that have one."""


def main(args: argparse.Namespace) -> int:
    """Print who works for the run: the newest attempt's processes, and what earlier ones left running.

    Raises:
        ConfigError: RUN is not the folder of a run.
        DamagedFileError: an attempt's record cannot be read.
    """
    run = existing_run(args.run)
    numbers = run.attempt_numbers()
    newest = numbers[-1] if numbers else 0
    standing = claim(run, newest, LEASE_TIMEOUT_S)
    workers = [*of_newest(run, newest), *left_running(run, newest)] if newest else []
    if args.json:
        record = {"run": str(run.root), "attempt": newest or None, "state": standing.kind, "reason": standing.reason}
        print(json.dumps(record | {"processes": [asdict(worker) for worker in workers]}))
    else:
        print("\n".join(describe(run, standing, workers)))
    return EXIT_DONE


def of_newest(run: RunDir, number: int) -> list[Worker]:
    """Processes of the newest attempt: its record's, and the flow that follows it from elsewhere."""
    record = read_json(run.attempt(number))
    refs = [ProcessRef.from_record(entry) for entry in record["processes"]]
    heard: dict[ProcessRef, float] = {ref: record["heartbeat"] for ref in refs if ref.role == "controller"}
    if run.flow_heartbeat(number).is_file():
        flow = read_json(run.flow_heartbeat(number))
        ref = next((r for r in refs if r.role == "flow"), ProcessRef.from_record(flow))
        heard[ref] = flow["heartbeat"]
        refs += [] if ref in refs else [ref]
    return [look(ref, number, heard.get(ref)) for ref in refs]


def left_running(run: RunDir, number: int) -> list[Worker]:
    """Processes on this host that attempts before `number` left running."""
    return [look(ref, None, None) for ref in leftovers(run, before=number)]


def look(ref: ProcessRef, attempt: int | None, heartbeat: float | None) -> Worker:
    """A process as it is now."""
    here, alive = ref.host == hostname(), ref.alive()
    return Worker(
        attempt=attempt,
        role=ref.role,
        rank=ref.rank,
        pid=ref.pid,
        host=ref.host,
        alive=alive if here else None,
        since=_since(ref) if alive else None,
        memory_bytes=_memory(ref.pid) if alive else None,
        heard_s=None if heartbeat is None else round(max(0.0, time.time() - heartbeat), 1),
    )


def describe(run: RunDir, standing: Claim, workers: Sequence[Worker]) -> Iterator[str]:
    """The list for a person: those that live or cannot be asked as a table, the dead ones in a line.

    Of an attempt that ended nobody is missed, so only those are shown that live all the same.
    """
    yield f"{run.root}: {standing.reason}"
    ended = standing.kind == "free"
    shown = [worker for worker in workers if worker.alive or (worker.alive is None and not ended)]
    if shown:
        yield from _columns([HEAD, *(_cells(worker) for worker in shown)])
    gone = [f"{_named(worker)} ({worker.pid})" for worker in workers if worker.alive is False]
    if gone and not ended:
        yield f"gone: {', '.join(gone)}"


def _cells(worker: Worker) -> tuple[str, ...]:
    return (
        "earlier" if worker.attempt is None else str(worker.attempt),
        worker.role,
        "" if worker.rank is None else str(worker.rank),
        str(worker.pid),
        worker.host,
        "yes" if worker.alive else "not known here",
        (worker.since or "")[:19].replace("T", " "),
        _size(worker.memory_bytes),
        "" if worker.heard_s is None else f"{timedelta(seconds=int(worker.heard_s))} ago",
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Aligned, without columns that are empty but for their head."""
    kept = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in kept}
    for row in rows:
        yield "  ".join(row[column].ljust(widths[column]) for column in kept).rstrip()


def _named(worker: Worker) -> str:
    return worker.role if worker.rank is None else f"{worker.role} {worker.rank}"


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return next((f"{num_bytes / unit:.1f} {name}" for unit, name in UNITS if num_bytes >= unit), f"{num_bytes} B")


def _memory(pid: int) -> int | None:
    try:
        return rss_bytes(pid)
    except (OSError, IndexError):
        return None


def _since(ref: ProcessRef) -> str | None:
    """When a living process of this host started: ticks since boot, and when that was."""
    boot = next((line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime ")), None)
    if boot is None:
        return None
    seconds = int(boot.split()[1]) + ref.start_time / os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
