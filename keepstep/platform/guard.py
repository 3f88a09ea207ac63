"""A supervisor of one embedded server: starts it, records it, ends it when nobody holds it any more.

    python -m keepstep.platform.guard <platform folder> <role> <url> -- <server command ...>

A run may die by SIGKILL at any moment and must not leave servers behind, and two runs in one parent folder share a
server. So neither run owns it: each puts a holder file (itself as a `ProcessRef`) under `holders/<role>/`, and this
process, which belongs to none of them, watches the holders and ends the server's process group `GRACE_S` after the
last one is gone. The environment of the server (credentials) is inherited, never written down.

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


def _start(platform: Path, role: str, url: str, command: list[str]) -> tuple[subprocess.Popen[bytes], ProcessRef]:
    log = log_path(platform, role)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = ProcessRef.of(process.pid, role)
    if server is None:
        raise SystemExit(f"{command[0]} ended at once with exit code {process.wait()}")
    guard = ProcessRef.current(role)
    write_record(record_path(platform, role), url=url, server=server.to_record(), guard=guard.to_record(), log=str(log))
    return process, server


def _supervise(platform: Path, role: str, process: subprocess.Popen[bytes], server: ProcessRef) -> None:
    last_held = time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        if not _is_recorded(platform, role, server):
            # The folder was deleted, perhaps made anew by another run: holders there are not this server's.
            end_group(server)
            return
        if live_holders(platform, role):
            last_held = time.monotonic()
        elif time.monotonic() - last_held >= GRACE_S:
            with start_lock(platform, role, timeout_s=0) as locked:
                if locked and not live_holders(platform, role):
                    _end(platform, role, server)
                    return


def _is_recorded(platform: Path, role: str, server: ProcessRef) -> bool:
    record = read_record(record_path(platform, role))
    return record is not None and ProcessRef.from_record(record["server"]) == server


def _end(platform: Path, role: str, server: ProcessRef) -> None:
    if _is_recorded(platform, role, server):
        record_path(platform, role).unlink(missing_ok=True)
    end_group(server)


def main(arguments: list[str]) -> int:
    platform, role, url, dashes, *command = arguments
    assert dashes == "--", arguments
    if os.fork():
        # The starter waits for this parent alone: the guard itself must be nobody's child, or it stays a zombie there.
        return 0
    os.setsid()
    process, server = _start(Path(platform), role, url, command)

    def leave(_number: int, _frame: object) -> None:
        _end(Path(platform), role, server)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _supervise(Path(platform), role, process, server)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
