"""The engines' ports are free on this host, or who holds them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from keepstep.errors import ConfigError

_LISTEN = "0A"


def check_port(port: int, key: str) -> None:
    """Raise `ConfigError` when something listens on `port`, with the process that does."""
    with socket.socket() as probe:
        # A port that a connection left a moment ago is free for a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            held = f"is in use by {holder(port)}" if error.errno == errno.EADDRINUSE else "may not be used by this user"
            raise ConfigError(
                f"{key}: port {port} {held}.",
                f"End that process, or give another {key}; each engine needs a few ports.",
            ) from None


def holder(port: int) -> str:
    """The process that listens on a TCP port of this host, from /proc, as a person would name it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for entry in os.listdir("/proc"):
        if entry.isdigit() and inodes & _links(Path("/proc") / entry / "fd"):
            return holder_of(int(entry))
    return "a process of another user"


def holder_of(pid: int) -> str:
    """A process as a person would name it."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return f"process {pid}, which is gone or in another namespace"
    return f"process {pid} ({command[:80]})"


def _links(folder: Path) -> set[str]:
    """Targets of a process's descriptors; those that close while we look are skipped."""
    found: set[str] = set()
    try:
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(entry))
    except OSError:
        pass
    return found
