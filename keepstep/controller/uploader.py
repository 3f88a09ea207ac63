"""Uploads behind the loop, one at a time, each in a process of its own at low priority.

Concurrency: one thread. It takes verified steps from the waiting ones, the newest multiple of `resume.prefer_multiple`
first, then the newest; waits for the upload process, retries with growing delays, and is woken by `add` or `drain`.
Training never waits for it; the end of the run does, within `s3.final_timeout_s`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.attempts import Attempt
from keepstep.checkpoint import layout
from keepstep.checkpoint.history import verified_steps
from keepstep.checkpoint.plan import only_damaged
from keepstep.checkpoint.publish import quarantine
from keepstep.checkpoint.verify import Verdict, verify
from keepstep.cli.transfer import CONFIG_VARIABLE
from keepstep.config.schema import RunConfig
from keepstep.controller.children import ChildResult, run_command
from keepstep.errors import EXIT_HELD, DamagedStepError, StorageError, StorageRefusedError
from keepstep.events.log import EventLog
from keepstep.run import RunDir
from keepstep.storage.protocol import LocalFileError

logger = logging.getLogger("keepstep")

NOT_OWED = "checkpoint"
"""Class of a step that left the disk before it was uploaded: nobody waits for it."""
REFUSED = ("storage_refused", "fenced", "contract")
"""Classes of failures after which another try gives the same."""
UPLOAD_TIMEOUT_S = 6 * 3600.0
LONGEST_DELAY_S = 60.0


def most_wanted(steps: Iterable[int], prefer_multiple: int) -> int:
    """The step to upload first: a resume prefers the newest multiple, then the newest."""
    return max(steps, key=lambda step: (step > 0 and step % prefer_multiple == 0, step))


class Uploader:
    """Brings verified checkpoints into the store."""

    def __init__(
        self, run: RunDir, config: RunConfig, attempt: Attempt, events: EventLog, environment: Mapping[str, str]
    ) -> None:
        self._run, self._config, self._attempt, self._events = run, config.s3, attempt, events
        self._prefer_multiple = config.resume.prefer_multiple
        # The settings of this start, whatever another one writes into config.yaml.
        sections = {"s3": config.s3.model_dump(mode="json"), "checkpoint": config.checkpoint.model_dump(mode="json")}
        self._environment = {**environment, CONFIG_VARIABLE: json.dumps(sections)}
        self._waiting: set[int] = set()
        self._ending = False
        self._changed = threading.Condition()
        self._failed: dict[int, tuple[str, str]] = {}
        """Reason and class of the last failure, by step."""
        self._closed = False
        self.current: int | None = None
        """The step that is being uploaded: it stays on disk meanwhile."""
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        with self._changed:
            self._waiting.add(step)
            self._changed.notify()

    def drain(self, timeout_s: float) -> None:
        """Wait until every step is confirmed; those that were given up during training are tried once more.

        Raises:
            StorageError: one was not confirmed within `timeout_s` or gave up.
            StorageRefusedError: the store said no.
            DamagedStepError: the newest step, or a reference, is no more what was saved.
        """
        self._hurry.set()
        with self._changed:
            self._waiting |= set(self._failed)
            self._ending = True
            self._changed.notify()
        self._thread.join(timeout=timeout_s)
        where = f"bucket {self._config.bucket or 'keepstep'}"
        if self._failed:
            step, (reason, failure_class) = next(iter(self._failed.items()))
            message = f"Training is done, but step {step} is not in {where}: {reason}"
            if failure_class == LocalFileError.failure_class:
                raise DamagedStepError(message, "The next start mends it, or goes on from the step before.")
            refused = failure_class in REFUSED
            raise (StorageRefusedError if refused else StorageError)(
                message, "Mend the store and start the same command again."
            )
        if self._thread.is_alive():
            raise StorageError(
                f"Training is done, but {where} confirmed not every upload within {timeout_s:.0f} s.",
                "Start the same command again: it uploads what is missing and trains nothing.",
            )

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                self._upload(step)
            except Exception as error:
                # A thread that died here would look like one that has finished.
                self._failed[step] = f"{type(error).__name__}: {error}", "bug"
            finally:
                self.current = None

    def _next(self) -> int | None:
        """Wait for a step; None: the run ends and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            if not self._waiting:
                return None
            step = most_wanted(self._waiting, self._prefer_multiple)
            self._waiting.remove(step)
            return step

    def close(self) -> None:
        """The attempt ends: what waits is the next one's. An upload that runs is ended with the other processes."""
        self._closed = True
        self._hurry.set()
        with self._changed:
            self._waiting.clear()
            self._ending = True
            self._changed.notify()

    def _upload(self, step: int) -> None:
        self.current = step
        for number in range(self._config.max_retries + 1):
            if self._closed or self._is_gone(step):
                return
            begin = time.monotonic()
            found = run_command(
                ["upload", str(self._run.root), "--step", str(step), "--attempt", str(self._attempt.number),
                 "--json", "--watch-stdin"],
                attempt=self._attempt,
                role="uploader",
                timeout_s=UPLOAD_TIMEOUT_S,
                environment=self._environment,
                niceness=19,
                on_line=self._tell_progress,
            )  # fmt: skip
            if found.status == 0:
                self._failed.pop(step, None)
                self._events.emit("checkpoint_uploaded", step=step, upload_s=round(time.monotonic() - begin, 3))
                self._tell_cleared(json.loads(found.stdout))
                return
            reason, final, failure_class = _reason(found)
            if failure_class == LocalFileError.failure_class:
                damage = self._damage(step)
                if damage is not None and self._set_aside(step, damage, reason):
                    return
                # A file that only could not be read, on a network's disk perhaps, is read again.
                final = damage is not None
            if found.status == EXIT_HELD:
                # Another machine has the run: the loop stops at its next look.
                self._attempt.fenced.set()
            self._failed[step] = reason, failure_class
            self._events.emit("upload_failed", step=step, reason=reason, tries=number + 1, **{"class": failure_class})
            if final or number == self._config.max_retries:
                return
            if self._hurry.wait(min(LONGEST_DELAY_S, 2.0**number)):
                self._hurry.clear()

    def _is_gone(self, step: int) -> bool:
        """Whether the step has left the disk while it waited: then it is owed no more."""
        if self._run.checkpoint(step).is_dir():
            return False
        self._failed.pop(step, None)
        self._events.emit("upload_failed", step=step, reason="it is not on this disk any more", **{"class": NOT_OWED})
        return True

    def _damage(self, step: int) -> Verdict | None:
        """What is wrong with a step of which a file was not as its manifest says; None: it is whole after all."""
        folder = self._run.checkpoint(step)
        try:
            before = folder.stat().st_ino
            verdict = verify(folder)
            # Trained again, it may be replaced while we look: then nothing is known of what stands there now.
            return None if verdict.resumable or folder.stat().st_ino != before else verdict
        except FileNotFoundError:
            return None

    def _set_aside(self, step: int, damage: Verdict, reason: str) -> bool:
        """Whether a step that was damaged on disk while it waited could be set aside.

        The newest has to be mended or trained again, and a reference, which all steps share, can be mended: both by the
        plan of the next attempt.
        """
        if step >= max(verified_steps(self._run), default=0) or only_damaged(damage, f"{layout.REF_DIR}/"):
            return False
        moved = quarantine(self._run, self._run.checkpoint(step), step, "damaged", self._attempt.check)
        self._failed.pop(step, None)
        self._events.emit("checkpoint_rejected", step=step, reason=reason, quarantined=str(moved))
        return True

    def _tell_progress(self, line: str) -> bool:
        """Emit the uploader's progress; False: the line is none."""
        try:
            fields = json.loads(line)["upload_progress"]
        except (ValueError, TypeError, KeyError):
            return False
        self._events.emit("upload_progress", **fields)
        return True

    def _tell_cleared(self, record: Mapping[str, Any]) -> None:
        """What the uploader deleted from the store after its upload, and that it could not."""
        for entry in record["retired"]:
            self._events.emit("checkpoint_pruned", source="s3", **entry)
        if "clear_error" in record:
            logger.warning("nothing more was cleared from the store: %s", record["clear_error"])


def _reason(found: ChildResult) -> tuple[str, bool, str]:
    """(what went wrong, whether another try cannot help, the error's class)."""
    try:
        record = json.loads(found.stdout)
    except ValueError:
        return f"the uploader ended with {found.status}: {found.stderr.strip()[-300:]}", False, "worker_died"
    failure_class = str(record.get("class", ""))
    refused = failure_class in REFUSED
    return ("refused: " if refused else "") + str(record.get("message", "")), refused, failure_class
