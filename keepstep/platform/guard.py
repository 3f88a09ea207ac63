"""A supervisor of one embedded server: starts it, records it, ends it when nobody holds it any more.

    python -m keepstep.platform.guard <platform folder> <role> <url> -- <server command ...>

A run may die by SIGKILL at any moment and must not leave servers behind, and two runs in one parent folder share a
server. So neither run owns it: each puts a holder file (itself as a `ProcessRef`) under `holders/<role>/`, and this
process, which belongs to none of them, watches the holders and ends the server's process group `GRACE_S` after the
last one is gone. A server that ends while it is held is started again under its address, at most `MAX_RESTARTS` times.
The environment of the server (credentials) is inherited, never written down.

Start and end exclude each other by a lock on `<role>.lock`, so a run that arrives while the server is being ended
waits and then starts a new one.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keepstep.processes import ProcessRef, boot_id
from keepstep.run import read_json, write_json

POLL_S = 0.5
GRACE_S = 3.0
TERM_S = 4.0
MAX_RESTARTS = 5

Record = dict[str, Any]


def record_path(platform: Path, role: str) -> Path:
    return platform / f"{role}.json"


def log_path(platform: Path, role: str) -> Path:
    return platform / "logs" / f"{role}.log"


def holder_path(platform: Path, role: str, holder: ProcessRef) -> Path:
    return platform / "holders" / role / f"{holder.pid}-{holder.start_time}.json"


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


def end_group(leader: ProcessRef, term_s: float = TERM_S) -> None:
    """End the session that `leader` leads: SIGTERM, then SIGKILL to whatever is left of its process group."""
    if not leader.alive():
        return
    _signal_group(leader.pid, signal.SIGTERM)
    deadline = time.monotonic() + term_s
    while leader.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(leader.pid, signal.SIGKILL)
    while leader.alive() and time.monotonic() < deadline + 5.0:
        time.sleep(0.05)


def _signal_group(leader_pid: int, number: int) -> None:
    try:
        os.killpg(leader_pid, number)
    except (ProcessLookupError, PermissionError):
        pass


class Guard:
    """The server that this process looks after."""

    def __init__(self, platform: Path, role: str, url: str, command: list[str]) -> None:
        self._platform, self._role, self._url, self._command = platform, role, url, command
        self._process, self._server = self._start()

    def supervise(self) -> None:
        """Return when the server has ended for good: nobody holds it, or it ends again and again."""
        last_held = time.monotonic()
        num_restarts = 0
        while True:
            time.sleep(POLL_S)
            if not self._is_recorded():
                # The folder was deleted, perhaps made anew by another run: holders there are not this server's.
                end_group(self._server)
                return
            if live_holders(self._platform, self._role):
                last_held = time.monotonic()
            elif time.monotonic() - last_held >= GRACE_S and self._end_unless_held():
                return
            if self._process.poll() is not None:
                if num_restarts == MAX_RESTARTS:
                    return
                # A run that holds it knows its address, so it comes back under the same one.
                self._process, self._server = self._start()
                num_restarts += 1

    def end(self) -> None:
        if self._is_recorded():
            record_path(self._platform, self._role).unlink(missing_ok=True)
        end_group(self._server)

    def _start(self) -> tuple[subprocess.Popen[bytes], ProcessRef]:
        log = log_path(self._platform, self._role)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        server = ProcessRef.of(process.pid, self._role)
        if server is None:
            raise SystemExit(f"{self._command[0]} ended at once with exit code {process.wait()}")
        write_record(
            record_path(self._platform, self._role),
            url=self._url,
            server=server.to_record(),
            guard=ProcessRef.current(self._role).to_record(),
        )
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
    guard = Guard(Path(platform), role, url, command)

    def leave(_number: int, _frame: object) -> None:
        guard.end()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard.supervise()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
