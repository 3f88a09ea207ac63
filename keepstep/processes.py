"""What a process is: host, pid, start time and boot id together, so that a reused pid is never mistaken for it.

Only Linux's /proc is used. Nothing here matches processes by name.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_S = 0.05


def hostname() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """Identity of this boot of the machine: pids start anew with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Start of `pid` in clock ticks since boot (/proc/<pid>/stat, field 22), None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces and parentheses itself.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


@dataclass(frozen=True)
class ProcessRef:
    """One process of an attempt, as it stands in `attempts/<n>.json`."""

    role: str
    pid: int
    start_time: int
    host: str
    rank: int | None = None

    @classmethod
    def of(cls, pid: int, role: str, rank: int | None = None) -> ProcessRef | None:
        started = start_time(pid)
        return None if started is None else cls(role, pid, started, hostname(), rank)

    @classmethod
    def current(cls, role: str) -> ProcessRef:
        ref = cls.of(os.getpid(), role)
        assert ref is not None, "a running process has a start time"
        return ref

    @classmethod
    def from_record(cls, record: dict) -> ProcessRef:
        role, pid, started, host = (record[name] for name in ("role", "pid", "start_time", "host"))
        return cls(role, pid, started, host, record.get("rank"))

    def to_record(self) -> dict:
        return asdict(self)

    def alive(self) -> bool:
        """Whether exactly this process still runs on this host. Processes of other hosts count as not alive here."""
        return self.host == hostname() and start_time(self.pid) == self.start_time


def terminate(refs: Iterable[ProcessRef], grace_s: float = 3.0) -> list[ProcessRef]:
    """SIGTERM, then after `grace_s` SIGKILL, those of `refs` that still run on this host. Returns the ended ones."""
    victims = [ref for ref in refs if ref.alive() and ref.pid != os.getpid()]
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        remaining = [ref for ref in victims if ref.alive()]
        if not remaining:
            break
        for ref in remaining:
            _send(ref, number)
            # A stopped process never sees SIGTERM until it is continued.
            _send(ref, signal.SIGCONT)
        deadline = time.monotonic() + patience_s
        while any(ref.alive() for ref in remaining) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return victims


def kill(refs: Iterable[ProcessRef]) -> None:
    """SIGKILL those of `refs` that still run on this host."""
    for ref in refs:
        _send(ref, signal.SIGKILL)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process on this host (/proc/<pid>/statm, second field, pages)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """All living descendants of `pid` on this host, from the parent links in /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        parent = int(stat[stat.rindex(")") + 2 :].split()[1])
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def marked(variable: str, roles: Mapping[str, str]) -> list[ProcessRef]:
    """Living processes of this user on this host that were started with `variable` set to one of the keys of `roles`.

    Children inherit their environment, so these are found when every recorded ancestor is gone. A process that set the
    variable itself is not: what counts is what it was started with.
    """
    found = []
    prefix = f"{variable}=".encode()
    for entry in os.listdir("/proc") if roles else []:
        try:
            pairs = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") if entry.isdigit() else []
        except OSError:
            continue
        value = next((pair[len(prefix) :].decode(errors="replace") for pair in pairs if pair.startswith(prefix)), "")
        ref = ProcessRef.of(int(entry), roles[value]) if value in roles else None
        if ref is not None:
            found.append(ref)
    return found


def _send(ref: ProcessRef, number: int) -> None:
    try:
        if ref.alive():
            os.kill(ref.pid, number)
    except (ProcessLookupError, PermissionError):
        pass
