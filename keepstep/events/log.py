"""Writing and reading events.jsonl and metrics.jsonl.

One `write` per line on an O_APPEND descriptor, so lines of several processes never interleave. A line torn by a kill or
a full disk is closed by the next writer and skipped by readers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]
SIGN_OF_LIFE = "sign_of_life"
"""For whoever follows the trainer and would end one that is silent; it is written nowhere."""
SIGN_INTERVAL_S = 10.0


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonLines:
    """A JSONL file that is appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        # Reentrant: a handler of a signal may write of the end in the middle of another line.
        self._lock = threading.RLock()
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def append(self, record: Event) -> None:
        """Append a line. Safe from any thread.

        Raises:
            OSError: there is no room for it.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with self._lock:
            line = b"\n" * self._torn + line
            # A nearly full disk takes a part of it and says no more than how much: the next line must not go on there.
            self._torn = os.write(self._fd, line) < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        # A thread that comes late must not write into what is opened next.
        self._fd = -1


class EventLog:
    """Appends the events of one attempt and hands each to the listeners."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.attempt = attempt
        self.listeners: list[Listener] = []
        self._lines = JsonLines(path)
        self._told = time.monotonic()

    def emit(self, event: str, **fields: Any) -> Event:
        """Append one event, make it durable, tell the listeners. Safe from any thread.

        A listener that fails (its terminal or its pipe is gone) is told nothing more: showing must not stop training.
        """
        record: Event = {"time": utc_now(), "attempt": self.attempt, "event": event, **fields}
        self._lines.append(record)
        self._lines.sync()
        self._tell(record)
        return record

    def sign_of_life(self) -> None:
        """Tell the listeners alone that something has come to its end in the middle of a long act; not too often."""
        if time.monotonic() - self._told >= SIGN_INTERVAL_S:
            self._tell({"attempt": self.attempt, "event": SIGN_OF_LIFE})

    def _tell(self, record: Event) -> None:
        self._told = time.monotonic()
        for listener in list(self.listeners):
            try:
                listener(record)
            except Exception:
                # Another thread may have left it out in the same moment.
                with contextlib.suppress(ValueError):
                    self.listeners.remove(listener)

    def close(self) -> None:
        self._lines.close()


def read_jsonl(path: Path, containing: bytes = b"") -> Iterator[Event]:
    """Every whole line of a JSONL file that has these bytes; torn lines are skipped, a missing file is empty."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        if containing not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def last_step_rows(path: Path) -> dict[int, Event]:
    """The last `step` event of every step: a replayed step counts once, as it was trained last."""
    return {event["step"]: event for event in read_jsonl(path) if event.get("event") == "step"}
