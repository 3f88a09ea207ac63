"""Progress of a run in the terminal: one live line on a tty, plain lines elsewhere. A listener of events."""

from __future__ import annotations

import sys
import time
from typing import Any

PLAIN_INTERVAL_S = 5.0


class ProgressPrinter:
    """Prints events as they come: step, reward, KL, seconds per step, time left; and what happens to checkpoints."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last_plain = 0.0
        self._seconds: list[float] = []
        self._open_line = False

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self._step(event)
        elif text := describe(event):
            self._line(text)

    def _step(self, event: dict[str, Any]) -> None:
        self._seconds = [*self._seconds[-19:], event.get("seconds", 0.0)]
        mean_s = sum(self._seconds) / len(self._seconds)
        left = max(0, int(mean_s * (event["total"] - event["step"])))
        kl = f"  KL {event['kl']:.4f}" if "kl" in event else ""
        text = (
            f"step {event['step']:>4}/{event['total']}  reward {event['reward']:.3f}{kl}  "
            f"{mean_s:.2f} s/step  {left // 60}:{left % 60:02d} left"
        )
        if "val_reward" in event:
            self._line(f"step {event['step']:>4}/{event['total']}  validation (greedy) {event['val_reward']:.3f}")
        if self._live:
            filled = 24 * event["step"] // event["total"]
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (24 - filled)}] {text}")
            sys.stderr.flush()
            self._open_line = True
        elif time.monotonic() - self._last_plain > PLAIN_INTERVAL_S or event["step"] == event["total"]:
            self._last_plain = time.monotonic()
            self._line(text)

    def _line(self, text: str) -> None:
        if self._open_line:
            sys.stderr.write("\r\x1b[K")
            self._open_line = False
        print(text, file=sys.stderr, flush=True)


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
