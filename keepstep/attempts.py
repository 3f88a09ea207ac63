"""Attempts: who may write into a run.

An attempt takes the next number by exclusive create of `attempts/<n>.json` and rewrites that file with a heartbeat.
The highest number owns the run; every other one is stale and may write nothing.

Owner is the process that trains (the controller). A flow that started it stands in `processes`; when the flow is
dead and its trainer still lives, the next start fences the trainer and ends it. Whether a flow on another host lives is
told by its own heartbeat, `attempts/<n>.flow.json`.

Concurrency: one heartbeat thread per attempt. It consumes nothing, rewrites the record every `heartbeat_s`, sets
`fenced` when a higher number appears, and stops when `close` sets its event. A flow has one of its own, in its process.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import FencedError, HeldError
from keepstep.events.log import read_jsonl
from keepstep.processes import ProcessRef, boot_id, hostname, marked, terminate
from keepstep.run import RunDir, create_exclusive, read_json, write_json

logger = logging.getLogger("keepstep")

Record = dict[str, Any]
MARK_VARIABLE = "KEEPSTEP_ATTEMPT"
FLOW_RUN_VARIABLE = "KEEPSTEP_FLOW_RUN"
"""The name of the flow run: in the flow's process, and in the trainer's that it starts."""
SHARED_ROLES = ("flow", "object-store", "prefect-server")


@dataclass(frozen=True)
class Claim:
    """What the newest attempt of a run means for a new start.

    kind: `free` (none, or ended), `dead` (owner gone), `silent` (other host, heartbeat too old),
    `orphan` (trainer alive, its flow dead or silent), `held` (alive: refuse).
    """

    kind: str
    reason: str

    @property
    def open(self) -> bool:
        return self.kind != "held"


def judge(
    record: Record | None,
    *,
    alive: Callable[[ProcessRef], bool],
    now: float,
    host: str,
    boot: str,
    lease_timeout_s: float,
    flow_heartbeat: float | None = None,
    starter: ProcessRef | None = None,
    flow_run: Callable[[], str | None] = lambda: None,
) -> Claim:
    """Decide whether a new attempt may take over from the newest recorded one. Pure: everything is handed in.

    Args:
        flow_heartbeat: when the flow of that attempt was last heard of; None: it never was.
        starter: the flow that starts the new attempt.
        flow_run: name of the flow run that started that attempt; asked only where the claim tells it.
    """
    if record is None:
        return Claim("free", "no earlier attempt")
    number, owner = record["attempt"], record["owner"]
    if record["outcome"] is not None:
        return Claim("free", f"attempt {number} ended: {record['outcome']['status']}")
    if owner["host"] != host:
        silence_s = now - record["heartbeat"]
        if silence_s > lease_timeout_s:
            return Claim("silent", f"attempt {number} on {owner['host']} has been silent for {silence_s:.0f} s")
        held = f"attempt {number} runs on {owner['host']} (last heartbeat {silence_s:.0f} s ago)"
    elif owner["boot_id"] != boot:
        return Claim("dead", f"attempt {number} ran before this machine's last boot")
    elif not alive(ProcessRef("controller", owner["pid"], owner["start_time"], host)):
        return Claim("dead", f"attempt {number}'s process {owner['pid']} is gone")
    else:
        held = f"attempt {number} runs on this host as process {owner['pid']}"
    flow = next((ProcessRef.from_record(entry) for entry in record["processes"] if entry["role"] == "flow"), None)
    if flow is None:
        return Claim("held", held)
    trainer = f"attempt {number}'s trainer {owner['pid']}"
    if starter is not None and _same(flow, starter):
        return Claim("orphan", f"{trainer} was given up by its flow {flow.pid}, which starts another")
    if flow.host == host and not alive(flow):
        return Claim("orphan", f"{trainer} outlived its flow {flow.pid}")
    silence_s = now - flow_heartbeat if flow.host != host and flow_heartbeat is not None else 0.0
    if silence_s > lease_timeout_s:
        return Claim("orphan", f"{trainer} outlived its flow on {flow.host}, silent for {silence_s:.0f} s")
    name = flow_run()
    starter_name = f"flow run {name}, " if name else ""
    return Claim("held", f"{held}, started by {starter_name}process {flow.pid} on {flow.host}")


def _same(one: ProcessRef, other: ProcessRef) -> bool:
    return (one.host, one.pid, one.start_time) == (other.host, other.pid, other.start_time)


def newest_record(run: RunDir) -> Record | None:
    numbers = run.attempt_numbers()
    return read_json(run.attempt(numbers[-1])) if numbers else None


def claim(run: RunDir, number: int, lease_timeout_s: float, starter: ProcessRef | None = None) -> Claim:
    """`judge` on attempt `number` (0: there is none), here and now."""
    return judge(
        read_json(run.attempt(number)) if number else None,
        alive=ProcessRef.alive,
        now=time.time(),
        host=hostname(),
        boot=boot_id(),
        lease_timeout_s=lease_timeout_s,
        flow_heartbeat=flow_heartbeat(run, number),
        starter=starter,
        flow_run=lambda: flow_run_of(run, number),
    )


def flow_run_of(run: RunDir, number: int) -> str | None:
    """Name of the flow run that started attempt `number`, as its first event tells; None: none did, or it is not told.

    The record of an attempt names processes alone.
    """
    try:
        started = list(read_jsonl(run.events, containing=b'"attempt_started"'))
    except OSError:
        # A name that cannot be read is no reason to refuse a start.
        return None
    return next((event.get("flow_run") for event in started if event.get("attempt") == number), None)


def flow_heartbeat(run: RunDir, number: int) -> float | None:
    """When the flow of an attempt was last heard of (seconds since the epoch); None: never."""
    try:
        return float(read_json(run.flow_heartbeat(number))["heartbeat"])
    except FileNotFoundError:
        return None


def mark(run: RunDir, number: int) -> str:
    """What the processes that attempt `number` starts carry in their environment as `MARK_VARIABLE`."""
    return f"{run.root}#{number}"


def leftovers(run: RunDir, before: int | None = None) -> list[ProcessRef]:
    """Processes of attempts that still run on this host; of all attempts below `before`.

    They are known by the attempt's record, and by the mark that every process inherits which an attempt starts: a
    killed engine may leave a child that no record names.
    """
    numbers = [number for number in run.attempt_numbers() if before is None or number < before]
    recorded = [ref for number in numbers for ref in recorded_processes(run, number) if ref.alive()]
    inherited = marked(MARK_VARIABLE, {mark(run, number): f"child of attempt {number}" for number in numbers})
    known = {ref.pid for ref in recorded} | {os.getpid()}
    return [ref for ref in recorded if ref.pid != os.getpid()] + [ref for ref in inherited if ref.pid not in known]


def end_leftovers(run: RunDir, before: int) -> list[ProcessRef]:
    """End what attempts below `before` left on this host."""
    return terminate(leftovers(run, before))


def recorded_processes(run: RunDir, number: int) -> list[ProcessRef]:
    """What an attempt recorded of its own processes: its flow may be the one that starts the next attempt, and servers
    are shared, so neither counts."""
    try:
        processes = [ProcessRef.from_record(process) for process in read_json(run.attempt(number))["processes"]]
    except FileNotFoundError:
        return []
    return [ref for ref in processes if ref.role not in SHARED_ROLES]


def end_attempt(run: RunDir, number: int) -> list[ProcessRef]:
    """End the recorded processes of one attempt that still live on this host, this process excepted, and remove its
    temporary files."""
    ended = terminate(recorded_processes(run, number))
    shutil.rmtree(run.temporary(number), ignore_errors=True)
    return ended


class Attempt:
    """One attempt's lease. `acquire`, then `close` with the outcome."""

    def __init__(self, run: RunDir, record: Record, heartbeat_s: float) -> None:
        self.run = run
        self.number: int = record["attempt"]
        self.fenced = threading.Event()
        self._record = record
        # Reentrant: a second SIGTERM closes the attempt from a handler that may interrupt a holder of this lock.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._heartbeat_s = heartbeat_s
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        run: RunDir,
        *,
        others: list[ProcessRef],
        lease_timeout_s: float,
        heartbeat_s: float,
        at_least: int = 1,
    ) -> Attempt:
        """Take the next attempt number, or raise `HeldError` naming the holder.

        `others` are processes that belong to the attempt already (the flow, embedded servers). `at_least` keeps
        numbers growing when the local folder was lost but the store remembers higher ones.
        """
        # One listing for both: judged and numbered from different ones, several simultaneous starts would each win.
        newest = max(run.attempt_numbers(), default=0)
        starter = next((ref for ref in others if ref.role == "flow"), None)
        verdict = claim(run, newest, lease_timeout_s, starter)
        if not verdict.open:
            raise HeldError(
                f"{run.root} is held: {verdict.reason}.",
                f"Wait for it, end it, or give this start another trainer.output_dir. See {run.attempts}.",
            )
        owner = ProcessRef.current("controller")
        number = max(at_least, newest + 1)
        record: Record = {
            "attempt": number,
            "owner": {"host": owner.host, "pid": owner.pid, "start_time": owner.start_time, "boot_id": boot_id()},
            "heartbeat": time.time(),
            "outcome": None,
            "processes": [ref.to_record() for ref in [owner, *others]],
        }
        if not create_exclusive(run.attempt(number), json.dumps(record, indent=2).encode()):
            raise HeldError(f"{run.root}: another start took attempt {number} in the same moment.", "Start again.")
        end_leftovers(run, before=number)
        return cls(run, record, heartbeat_s)

    def add(self, pid: int, role: str) -> None:
        """Record a process of this attempt. One that is gone already is not recorded.

        Of short-lived ones of a role those that are gone make room: a run makes thousands.
        """
        ref = ProcessRef.of(pid, role)
        if ref is not None:
            with self._lock:
                kept = [p for p in self._record["processes"] if p["role"] != role or ProcessRef.from_record(p).alive()]
                self._record["processes"] = [*kept, ref.to_record()]
                self._write()

    def add_remote(self, ref: ProcessRef) -> None:
        with self._lock:
            self._record["processes"].append(ref.to_record())
            self._write()

    def processes(self) -> list[ProcessRef]:
        with self._lock:
            return [ProcessRef.from_record(process) for process in self._record["processes"]]

    def check(self) -> None:
        """Raise `FencedError` when a newer attempt owns the run; called before anything is published or deleted."""
        if not self._stands():
            message = f"{self.run.attempt(self.number)} is gone: somebody removed or moved the run's folder."
            raise FencedError(message, "Start again: it goes on from what is in the store.")
        check_fence(self.run, self.number)

    def close(self, outcome: Record) -> None:
        """Record how the attempt ended and stop the heartbeat. A fenced attempt writes nothing."""
        self._closed.set()
        self._thread.join(timeout=10)
        with self._lock:
            if not is_fenced(self.run, self.number):
                self._record["outcome"] = outcome
                self._write()

    def _stands(self) -> bool:
        return self.run.attempt(self.number).exists()

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            try:
                if is_fenced(self.run, self.number) or not self._stands():
                    self.fenced.set()
                    return
                with self._lock:
                    self._write()
            except OSError as error:
                # A full disk now may have room at the next beat; a thread that ends here would never beat again.
                logger.warning("no heartbeat written: %s", error)

    def _write(self) -> None:
        self._record["heartbeat"] = time.time()
        # A folder that is gone must stay gone: what came back of it would be taken for somebody else's.
        if self._stands():
            write_json(self.run.attempt(self.number), self._record)


class FlowHeartbeat:
    """A flow's sign of life beside the attempt that it follows, for starts on other hosts. Use as a context manager.

    Concurrency: one thread, from the first event of the attempt to the end of the context; it consumes nothing and
    rewrites `attempts/<n>.flow.json` every `heartbeat_s`.
    """

    def __init__(self, run: RunDir, heartbeat_s: float) -> None:
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FlowHeartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def heed(self, event: Record) -> None:
        """Begin with the attempt that this event is about: before there is one, nothing is written into the run."""
        if self._thread is None and "attempt" in event:
            self._thread = threading.Thread(
                target=self._beat, args=(event["attempt"],), name="flow-heartbeat", daemon=True
            )
            self._thread.start()

    def _beat(self, number: int) -> None:
        path, flow = self._run.flow_heartbeat(number), ProcessRef.current("flow").to_record()
        while True:
            try:
                write_json(path, flow | {"heartbeat": time.time()})
            except OSError as error:
                logger.warning("no heartbeat of the flow written: %s", error)
            if self._closed.wait(self._heartbeat_s):
                return


def is_fenced(run: RunDir, number: int) -> bool:
    return any(other > number for other in run.attempt_numbers())


def check_fence(run: RunDir, number: int) -> None:
    if is_fenced(run, number):
        newest = run.attempt_numbers()[-1]
        raise FencedError(f"Attempt {number} of {run.root} is stale: attempt {newest} took the run over.")
