"""Progress of a run in the terminal: a live line on a tty, plain lines elsewhere. A listener of events."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_INTERVAL_S = 5.0
PACE_STEPS = 20
"""Steps whose mean tells the time that is left."""
LAST_EVENTS = ("finished", "failed", "preempted", "fenced")
DUMB_TERMINALS = ("dumb", "unknown")


class ProgressPrinter:
    """Prints events as they come: step, reward, KL, seconds per step, time left; and what happens to checkpoints.

    Told from any thread. The live line has a thread of its own that redraws it; it ends with the attempt's last event.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS
        self._bar: _Bar | None = None
        self._last_plain = 0.0
        self._seconds: list[float] = []

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if self._bar is not None and kind in ("upload_progress", "checkpoint_uploaded", "upload_failed"):
            self._bar.note(upload_note(event) if kind == "upload_progress" else "")
        if "val_reward" in event:
            self._line(f"step {event['step']:>4}/{event['total']}  validation {event['val_reward']:.3f}")
        if kind == "step":
            self._step(event)
        elif text := describe(event):
            self._line(text)
        if self._live and kind == "attempt_started":
            self._bar = self._bar or _Bar()
            self._bar.wait_for_steps(event.get("total_steps"))
        elif self._bar is not None and kind in LAST_EVENTS:
            self._bar.stop()
            self._bar = None

    def _step(self, event: dict[str, Any]) -> None:
        self._seconds = [*self._seconds[1 - PACE_STEPS :], event.get("seconds", 0.0)]
        figures = figures_of(event, sum(self._seconds) / len(self._seconds))
        text = f"step {event['step']:>4}/{event['total']}  {figures}"
        if self._live:
            self._bar = self._bar or _Bar()
            self._bar.step(event["step"], event["total"], figures)
        elif time.monotonic() - self._last_plain > PLAIN_INTERVAL_S or event["step"] == event["total"]:
            self._last_plain = time.monotonic()
            self._line(text)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, file=sys.stderr, flush=True)


class _Bar:
    """The live line. rich looks after NO_COLOR, the terminal's width, and lines that others print meanwhile."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        console = Console(stderr=True)
        self._progress: Progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=console,
            refresh_per_second=4,
            # What goes into a file is not brought onto the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task: TaskID = self._progress.add_task("starting", total=None)
        self._figures, self._note = "starting", ""
        self._progress.start()
        # A process that is killed cannot bring a hidden cursor back.
        console.show_cursor(True)
        atexit.register(self._progress.stop)

    def wait_for_steps(self, total: int | None) -> None:
        """An attempt begins: nothing is known of its steps until the first is finished."""
        self._figures = "starting" if total is None else f"starting, {total} steps in all"
        self._progress.update(self._task, total=None, description=self._text(), refresh=True)

    def step(self, step: int, total: int, figures: str) -> None:
        self._figures = f"step {step}/{total}  {figures}"
        self._progress.update(self._task, completed=step, total=total, description=self._text(), refresh=True)

    def note(self, text: str) -> None:
        """What goes on beside the training."""
        self._note = text
        self._progress.update(self._task, description=self._text(), refresh=True)

    def print(self, text: str) -> None:
        """A line above the live one."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._progress.stop()
        atexit.unregister(self._progress.stop)

    def _text(self) -> str:
        return f"{self._figures}  {self._note}" if self._note else self._figures


def figures_of(event: dict[str, Any], mean_s: float) -> str:
    """The figures of a finished step: reward, KL, pace, time left."""
    minutes, seconds = divmod(max(0, int(mean_s * (event["total"] - event["step"]))), 60)
    left = f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    kl = f"  KL {event['kl']:.4f}" if "kl" in event else ""
    return f"reward {event['reward']:.3f}{kl}  {mean_s:.2f} s/step  {left} left"


def upload_note(event: dict[str, Any]) -> str:
    """How far an upload is."""
    share = event["done_bytes"] / max(1, event["num_bytes"])
    return f"(uploading step {event['step']}: {min(1.0, share):.0%})"


def describe(event: dict[str, Any]) -> str:
    """What people want to see of an event, mostly one line, else nothing."""
    kind, step = event["event"], event.get("step")
    texts = {
        "attempt_started": f"attempt {event.get('attempt')} started",
        "state_loaded": "\n".join(event.get("sentences", [])),
        "initialised": f"begins with the weights of {event.get('source')}",
        "checkpoint_skipped": f"step {step} is NOT saved: {event.get('reason')}",
        "checkpoint_saved": f"checkpoint of step {step} saved ({event.get('outcome')})",
        "checkpoint_verified": f"checkpoint of step {step} verified",
        "checkpoint_rejected": f"checkpoint of step {step} rejected: {event.get('reason')}",
        "checkpoint_uploaded": f"checkpoint of step {step} uploaded and confirmed",
        "checkpoint_downloaded": f"checkpoint of step {step} fetched from the store",
        "upload_failed": f"upload of step {step} failed ({event.get('reason')})",
        "worker_lost": f"lost the {event.get('role')}",
        "recovered": f"the {event.get('role')} is back",
        "preempted": f"preempted: {event.get('message')}",
        "failed": f"attempt failed ({event.get('class')}): {event.get('message')}",
    }
    return texts.get(kind, "")
