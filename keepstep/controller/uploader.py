"""Uploads behind the loop, one at a time, each in a process of its own at low priority.

Concurrency: one thread. It consumes verified steps from a queue, waits for the upload process, retries with growing
delays, and is woken by `add` or `drain`. Training never waits for it; the end of the run does, within
`s3.final_timeout_s`.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping

from keepstep.attempts import Attempt
from keepstep.cli.transfer import S3_CONFIG_VARIABLE
from keepstep.config.schema import S3Config
from keepstep.controller.children import ChildResult, run_command
from keepstep.errors import StorageError, StorageRefusedError
from keepstep.events.log import EventLog
from keepstep.run import RunDir

UPLOAD_TIMEOUT_S = 6 * 3600.0
LONGEST_DELAY_S = 60.0


class Uploader:
    """Brings verified checkpoints into the store."""

    def __init__(
        self, run: RunDir, config: S3Config, attempt: Attempt, events: EventLog, environment: Mapping[str, str]
    ) -> None:
        self._run, self._config, self._attempt, self._events = run, config, attempt, events
        # The settings of this start: config.yaml holds those of the first.
        self._environment = {**environment, S3_CONFIG_VARIABLE: config.model_dump_json()}
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._failed: dict[int, str] = {}
        self.current: int | None = None
        """The step that is being uploaded."""
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        self._queue.put(step)

    def drain(self, timeout_s: float) -> None:
        """Wait until every step is confirmed; those that were given up during training are tried once more.

        Raises:
            StorageError: one was not confirmed within `timeout_s` or gave up.
            StorageRefusedError: the store said no.
        """
        self._hurry.set()
        for step in sorted(self._failed):
            self._queue.put(step)
        self._queue.put(None)
        self._thread.join(timeout=timeout_s)
        where = f"bucket {self._config.bucket or 'keepstep'}"
        if self._failed:
            step, reason = next(iter(self._failed.items()))
            message = f"Training is done, but step {step} is not in {where}: {reason}"
            refused = reason.startswith("refused")
            raise (StorageRefusedError if refused else StorageError)(
                message, "Mend the store and start the same command again."
            )
        if self._thread.is_alive():
            raise StorageError(
                f"Training is done, but {where} confirmed not every upload within {timeout_s:.0f} s.",
                "Start the same command again: it uploads what is missing and trains nothing.",
            )

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                self._upload(step)
            except Exception as error:
                # A thread that died here would look like one that has finished.
                self._failed[step] = f"{type(error).__name__}: {error}"

    def _upload(self, step: int) -> None:
        self.current = step
        for number in range(self._config.max_retries + 1):
            begin = time.monotonic()
            found = run_command(
                ["upload", str(self._run.root), "--step", str(step), "--attempt", str(self._attempt.number),
                 "--json", "--watch-stdin"],
                attempt=self._attempt,
                role="uploader",
                timeout_s=UPLOAD_TIMEOUT_S,
                environment=self._environment,
                niceness=19,
            )  # fmt: skip
            if found.status == 0:
                self._failed.pop(step, None)
                self._events.emit("checkpoint_uploaded", step=step, upload_s=round(time.monotonic() - begin, 3))
                return
            reason, final = _reason(found)
            self._failed[step] = reason
            self._events.emit("upload_failed", step=step, reason=reason, tries=number + 1)
            if final or number == self._config.max_retries:
                return
            if self._hurry.wait(min(LONGEST_DELAY_S, 2.0**number)):
                self._hurry.clear()


def _reason(found: ChildResult) -> tuple[str, bool]:
    """(what went wrong, whether another try cannot help)."""
    try:
        record = json.loads(found.stdout)
    except ValueError:
        return f"the uploader ended with {found.status}: {found.stderr.strip()[-300:]}", False
    refused = record.get("class") in ("storage_refused", "fenced", "contract", "local_file_differs")
    return ("refused: " if refused else "") + str(record.get("message", "")), refused
