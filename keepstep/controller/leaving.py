"""Being asked to leave: SIGTERM, Ctrl-C, a parent that is gone, a newer attempt.

Concurrency:
  signal handler   sets `asked`; the loop heeds it at the end of the step, start-up at once
  grace timer      started by the first signal; after `term_grace_s`, or at a second signal, ends the process
  stdin watcher    blocks on standard input; end of file means that the parent died: ends the process
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from keepstep.errors import FencedError, KeepstepError, OrphanedError, Preempted


class Leaving:
    """Notices that the attempt should end. `end_now(error)` records the end and ends the processes."""

    def __init__(self, grace_s: float, end_now: Callable[[KeepstepError], None]) -> None:
        self.asked = threading.Event()
        self.training = False
        """While False, being asked to leave raises at the next wait; while True the loop ends its step first."""
        self.fenced: threading.Event | None = None
        self._grace_s = grace_s
        self._end_now = end_now
        self._end_lock = threading.Lock()

    def install(self, *, watch_stdin: bool) -> None:
        """Take over SIGTERM and SIGINT; watch standard input when a parent holds its other end."""
        self.take_signals()
        if watch_stdin:
            threading.Thread(target=self._watch_stdin, name="stdin-watch", daemon=True).start()

    def take_signals(self) -> None:
        """Handle SIGTERM and SIGINT. To be called again after `ray.init`, which puts a handler of its own in place."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def check(self) -> None:
        """Raise when waiting any longer makes no sense.

        Raises:
            FencedError: a newer attempt owns the run.
            Preempted: asked to leave before training began.
        """
        if self.fenced is not None and self.fenced.is_set():
            raise FencedError("A newer attempt took the run over.")
        if self.asked.is_set() and not self.training:
            raise Preempted("Asked to leave during start-up.")

    def heed(self) -> bool:
        return self.asked.is_set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.asked.is_set():
            self._exit(Preempted("Asked to leave twice: left at once."))
        self.asked.set()
        timer = threading.Timer(
            self._grace_s, self._exit, (Preempted(f"Asked to leave: no end within {self._grace_s:.0f} s of grace."),)
        )
        timer.daemon = True
        timer.start()

    def _watch_stdin(self) -> None:
        # os.read, not sys.stdin: a thread inside its buffer lock makes the interpreter abort at exit.
        while os.read(0, 4096):
            pass
        self._exit(OrphanedError("The process that started this attempt is gone."))

    def _exit(self, failure: KeepstepError) -> None:
        # Whoever comes second leaves the ending to the first: a signal handler that waited here for the code that it
        # interrupted would wait for ever.
        if not self._end_lock.acquire(blocking=False):
            return
        try:
            self._end_now(failure)
        finally:
            os._exit(failure.exit_code)
