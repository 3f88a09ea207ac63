"""A supervisor of one server or worker: starts it, records it, ends it when nobody holds it any more.

    python -m keepstep.platform.guard <platform folder> <role> <url> -- <command ...>

A run may die by SIGKILL at any moment and must not leave servers behind, and two runs in one parent folder share a
server. So neither run owns it: each puts a holder file (itself as a `ProcessRef`) under `holders/<role>/`, and this
process, which belongs to none of them, watches the holders and ends the server's process group `GRACE_S` after the
last one is gone. What ends while it is held is started again under its address: at once, then after ever longer
pauses, up to `MAX_PAUSE_S`, until it has lived for `SETTLED_S`. The environment (credentials) is inherited, never
written down.

A worker's children lead sessions of their own (flow runs, which train on without their worker). They stand in
`children/<role>.json`; when the guard is told to end, each is asked to leave and has `CHILDREN_GRACE_S` for it, before
the worker hears of it: Prefect's worker kills what it started as soon as it is asked to end itself.

Start and end exclude each other by a lock on `<role>.lock`, so a run that arrives while the server is being ended
waits and then starts a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.processes import ProcessRef, boot_id, terminate
from keepstep.run import read_json, write_json

POLL_S = 0.5
GRACE_S = 3.0
TERM_S = 4.0
TOLD_S = 2.0
"""After the last child, for what its worker has to tell the server."""
SETTLED_S = 60.0
MAX_PAUSE_S = 30.0
CHILDREN_GRACE_S = 120.0
"""A flow that is asked to leave takes `retry.term_grace_s` (30) + 20 for its trainer and 60 for its last task runs."""

Record = dict[str, Any]


def record_path(platform: Path, role: str) -> Path:
    return platform / f"{role}.json"


def log_path(platform: Path, role: str) -> Path:
    return platform / "logs" / f"{role}.log"


def holder_path(platform: Path, role: str, holder: ProcessRef) -> Path:
    return platform / "holders" / role / f"{holder.pid}-{holder.start_time}.json"


def children_path(platform: Path, role: str) -> Path:
    return platform / "children" / f"{role}.json"


def read_record(path: Path) -> Record | None:
    """A record of this boot, else None: pids and start times mean nothing after a reboot."""
    try:
        record: Record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if record.get("boot_id") == boot_id() else None


def write_record(path: Path, **fields: Any) -> None:
    write_json(path, {"boot_id": boot_id(), **fields})


def live_holders(platform: Path, role: str) -> list[ProcessRef]:
    """Holders that still run. Files of dead ones are removed on the way."""
    folder = platform / "holders" / role
    alive = []
    for path in sorted(folder.glob("[0-9]*.json")) if folder.is_dir() else []:
        record = read_record(path)
        holder = ProcessRef.from_record(record["holder"]) if record else None
        if holder is not None and holder.alive():
            alive.append(holder)
        else:
            path.unlink(missing_ok=True)
    return alive


@contextmanager
def start_lock(platform: Path, role: str, timeout_s: float) -> Iterator[bool]:
    """Exclusive right to start or end this server; yields False when it was not to be had within `timeout_s`."""
    platform.mkdir(parents=True, exist_ok=True)
    handle = os.open(platform / f"{role}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _lock_within(handle, timeout_s)
    finally:
        os.close(handle)


def _lock_within(handle: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def end_group(leader: ProcessRef, children: Callable[[], list[ProcessRef]]) -> None:
    """End the living `children`, then the session that `leader` leads: SIGTERM, then SIGKILL to what is left.

    The leader lives until its children have left, and a moment longer: it is the one that tells how they ended.
    """
    if found := children():
        terminate(found, grace_s=CHILDREN_GRACE_S)
        if leader.alive():
            time.sleep(TOLD_S)
    if leader.alive():
        _end_session(leader)
    # What it was starting meanwhile.
    terminate(children(), grace_s=CHILDREN_GRACE_S)


def end_children(platform: Path, role: str) -> None:
    """Ask what the worker of this role has started to leave; the worker stays and tells how it ended."""
    terminate(live_children(platform, role), grace_s=CHILDREN_GRACE_S)


def _end_session(leader: ProcessRef) -> None:
    _signal_group(leader.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    while leader.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(leader.pid, signal.SIGKILL)
    while leader.alive() and time.monotonic() < deadline + 5.0:
        time.sleep(0.05)


def end_recorded(platform: Path, role: str) -> None:
    """End the guard of this role with all that it looks after; what a killed guard left behind likewise."""
    record = read_record(record_path(platform, role))
    if record is not None:
        terminate([ProcessRef.from_record(record["guard"])], grace_s=2 * CHILDREN_GRACE_S)
        end_group(ProcessRef.from_record(record["server"]), lambda: live_children(platform, role))
    end_children(platform, role)
    for path in (record_path(platform, role), children_path(platform, role)):
        path.unlink(missing_ok=True)


def live_children(platform: Path, role: str) -> list[ProcessRef]:
    """Recorded children of the server of this role that still run, also of a server that is gone."""
    record = read_record(children_path(platform, role))
    return [ref for ref in map(ProcessRef.from_record, record["children"] if record else []) if ref.alive()]


def session_leaders(parent: int) -> list[int]:
    """Children of `parent` that lead sessions of their own, which a signal to the parent's group does not reach."""
    found: list[int] = []
    try:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(pid) for pid in path.read_text().split()]
        return [pid for pid in found if os.getsid(pid) == pid]
    except OSError:
        # One of them ended in between: the next look tells.
        return []


def pause_s(num_ends: int) -> float:
    """Seconds before the next start after so many ends in a row."""
    return 0.0 if num_ends <= 1 else min(2.0 ** (num_ends - 2), MAX_PAUSE_S)


def _signal_group(leader_pid: int, number: int) -> None:
    try:
        os.killpg(leader_pid, number)
    except (ProcessLookupError, PermissionError):
        pass


class Guard:
    """The server or worker that this process looks after."""

    def __init__(self, platform: Path, role: str, url: str, command: list[str]) -> None:
        self._platform, self._role, self._url, self._command = platform, role, url, command
        self._children = live_children(platform, role)
        self._num_ends = 0
        self._started: float = 0.0
        self._ended: float | None = None
        self._process, self._server = self._start()

    def supervise(self) -> None:
        """Return when nobody holds it, or its folder is gone."""
        last_held = time.monotonic()
        while True:
            time.sleep(POLL_S)
            if not self._is_recorded():
                # The folder was deleted, perhaps made anew by another run: holders there are not this server's.
                end_group(self._server, lambda: [child for child in self._children if child.alive()])
                return
            if live_holders(self._platform, self._role):
                last_held = time.monotonic()
            elif time.monotonic() - last_held >= GRACE_S and self._end_unless_held():
                return
            self._note_children()
            if self._process.poll() is not None:
                self._start_again()

    def end(self) -> None:
        if self._is_recorded():
            record_path(self._platform, self._role).unlink(missing_ok=True)
        end_group(self._server, self._note_children)

    def _start_again(self) -> None:
        """Start it under the same address, which those that hold it know, once its pause is over."""
        now = time.monotonic()
        if self._ended is None:
            self._ended = now
            self._num_ends = 1 if now - self._started >= SETTLED_S else self._num_ends + 1
        if now - self._ended < pause_s(self._num_ends):
            return
        try:
            self._process, self._server = self._start()
        except (OSError, SystemExit) as error:
            # An installation that is being replaced has no program for a while; the next pause is longer.
            print(f"{self._role}: not started: {error}", file=sys.stderr, flush=True)

    def _note_children(self) -> list[ProcessRef]:
        """Record the living children and return them: they outlive the server, and whoever ends it has to find them."""
        leaders = session_leaders(self._server.pid) if self._server.alive() else []
        found = [ProcessRef.of(pid, f"{self._role}-child") for pid in leaders]
        children = [ref for ref in dict.fromkeys([*self._children, *found]) if ref is not None and ref.alive()]
        if children != self._children:
            with contextlib.suppress(OSError):
                # Without room for it now: at the next look.
                write_record(children_path(self._platform, self._role), children=[ref.to_record() for ref in children])
                self._children = children
        return children

    def _start(self) -> tuple[subprocess.Popen[bytes], ProcessRef]:
        self._started, self._ended = time.monotonic(), None
        log = log_path(self._platform, self._role)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        server = ProcessRef.of(process.pid, self._role)
        if server is None:
            raise SystemExit(f"{self._command[0]} ended at once with exit code {process.wait()}")
        try:
            write_record(
                record_path(self._platform, self._role),
                url=self._url,
                server=server.to_record(),
                guard=ProcessRef.current(self._role).to_record(),
            )
        except OSError:
            # No room for the record: nobody would find what was started, and the next try would start another one.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return process, server

    def _end_unless_held(self) -> bool:
        with start_lock(self._platform, self._role, timeout_s=0) as locked:
            if not locked or live_holders(self._platform, self._role):
                return False
            self.end()
            return True

    def _is_recorded(self) -> bool:
        record = read_record(record_path(self._platform, self._role))
        return record is not None and ProcessRef.from_record(record["server"]) == self._server


def main(arguments: list[str]) -> int:
    platform, role, url, dashes, *command = arguments
    assert dashes == "--", arguments
    if os.fork():
        # The starter waits for this parent alone: the guard itself must be nobody's child, or it stays a zombie there.
        return 0
    os.setsid()
    # A run's own link to the platform goes with the run, which says nothing of the platform.
    guard = Guard(Path(platform).resolve(), role, url, command)

    def leave(_number: int, _frame: object) -> None:
        guard.end()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.supervise()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
