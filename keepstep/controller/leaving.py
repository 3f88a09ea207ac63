"""Being asked to leave: SIGTERM, Ctrl-C, a node that drains, a parent that is gone, a newer attempt.

Concurrency:
  signal handler   sets `asked`; while training the loop heeds it, before and after it raises in the main thread
  `ask`            does the same from another thread; start-up notices at its next wait for a worker
  the loop         ends its step and leaves; a step that would not end within the grace is dropped at the next look
  time limits      end the process when code that nobody can interrupt (a reward function) never returns
  grace timer      started by the first notice; at its end, or at a second signal, the process ends
  stdin watcher    blocks on standard input; end of file means that the parent died: ends the process
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from keepstep.errors import FencedError, KeepstepError, OrphanedError, Preempted


class StepDropped(Exception):  # noqa: N818  (a decision, not a fault)
    """The running step, or its validation, would not end within the grace: what stands is to be saved."""


def asked_to_leave(error: BaseException) -> Preempted | None:
    """The notice that ended an attempt in another shape; None: it was none.

    What the signal handler raises inside of compiled code comes out as the cause of a SystemError; and until `ray.init`
    has returned the handler is Ray's, which raises SystemExit with the signal's number.
    """
    if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
        return Preempted("Asked to leave during start-up.")
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Preempted):
        seen = seen.__cause__
    return seen


class Leaving:
    """Notices that the attempt should end. `end_now(error)` records the end and ends the processes."""

    def __init__(self, grace_s: float, end_now: Callable[[KeepstepError], None]) -> None:
        self.asked = threading.Event()
        self.training = False
        """While False, being asked to leave raises; while True the loop decides what becomes of its step."""
        self.ending = False
        """The attempt has ended and is being recorded: nothing is interrupted any more."""
        self.drops: Callable[[float], bool] = lambda _remaining_s: False
        """Whether the running step is to be dropped when so many seconds of the grace remain."""
        self.fenced: threading.Event | None = None
        self.grace_s = grace_s
        self._deadline = float("inf")
        self._num_signals = 0
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

    def ask(self, reason: str, grace_s: float | None = None) -> None:
        """Have the attempt save and leave; what a first signal does, from any thread.

        Args:
            grace_s: seconds until the processes end by themselves; None: `retry.term_grace_s`.
        """
        grace_s = self.grace_s if grace_s is None else grace_s
        self._deadline = min(self._deadline, time.monotonic() + grace_s)
        self.asked.set()
        late = Preempted(f"Asked to leave ({reason}): no end within {grace_s:.0f} s of grace.")
        timer = threading.Timer(grace_s, self._exit, (late,))
        timer.daemon = True
        timer.start()

    def remaining_s(self) -> float:
        """Seconds of the grace that remain; infinite before anybody asked."""
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Raise when waiting any longer makes no sense. For the main thread.

        Raises:
            FencedError: a newer attempt owns the run.
            Preempted: asked to leave before training began.
            StepDropped: asked to leave, and the running step would take too long.
        """
        self.check_fence()
        if not self.asked.is_set():
            return
        if not self.training:
            raise Preempted("Asked to leave during start-up.")
        if self.drops(self.remaining_s()):
            raise StepDropped

    def check_fence(self) -> None:
        """Raise `FencedError` when the run is this attempt's no more. For the threads beside the loop."""
        if self.fenced is not None and self.fenced.is_set():
            raise FencedError("A newer attempt took the run over, or somebody removed its folder.")

    def heed(self) -> bool:
        return self.asked.is_set()

    @contextmanager
    def limit(self, timeout_s: float, late: Callable[[], KeepstepError]) -> Iterator[None]:
        """End the attempt when the block, which may call code that never returns, takes longer than `timeout_s`.

        Args:
            late: what it is ended with, asked for at that moment.
        """
        timer = threading.Timer(timeout_s, lambda: self._exit(late()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # The first signal after `ask` is no second one: a node that drains is deleted, and that comes as SIGTERM.
        self._num_signals += 1
        if self._num_signals > 1:
            self._exit(Preempted("Asked to leave twice: left at once."))
        self.ask(signal.Signals(number).name)
        if not self.training and not self.ending:
            # Nothing is half done that a SIGKILL could not leave as well, and waiting could outlast the grace.
            raise Preempted("Asked to leave while no step was running.")

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
