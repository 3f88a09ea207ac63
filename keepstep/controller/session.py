"""What one attempt holds while it lives: the run's record, log and events, and how it ends.

`keepstep.controller.attempt` makes it and says in which order things are done; whoever does one of them is given it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keepstep
from keepstep import reaper, waivers
from keepstep.attempts import FLOW_RUN_VARIABLE, MARK_VARIABLE, Attempt, end_attempt, mark
from keepstep.checkpoint import layout
from keepstep.config.load import to_yaml, without_what_holds_once
from keepstep.controller.leaving import Leaving, asked_to_leave
from keepstep.controller.reporting import log_config, logger, open_log
from keepstep.controller.uploader import Uploader
from keepstep.errors import (
    NO_ROOM_ERRNOS,
    BugError,
    KeepstepError,
    NoRoomError,
    Preempted,
)
from keepstep.events.log import EventLog, Listener, utc_now
from keepstep.platform import servers
from keepstep.preflight.model import model_folder
from keepstep.preflight.start import Start
from keepstep.processes import ProcessRef
from keepstep.run import read_json, write_atomic, write_json

if TYPE_CHECKING:
    from keepstep.controller.trainer import Trainer

Record = dict[str, Any]


class Session:
    """What one attempt holds while it lives."""

    def __init__(self, start: Start, attempt: Attempt, listeners: Sequence[Listener], watch_stdin: bool) -> None:
        self.start = start
        self.config = start.config
        self.run = start.run
        self.attempt = attempt
        self.reaper = reaper.start(attempt)
        # After the reaper, which outlives the attempt by a moment: everything else that it starts carries its mark.
        os.environ[MARK_VARIABLE] = mark(start.run, attempt.number)
        self.waivers_written = False
        self.record = self._write_record()
        open_log(self.run, attempt.number)
        self.events = EventLog(self.run.events, attempt.number)
        self.events.listeners += listeners
        self.uploader: Uploader | None = None
        self.on_loop: Callable[[Trainer], None] = lambda _: None
        self.leaving = Leaving(self.config.retry.term_grace_s, self._end_now)
        self.leaving.fenced = attempt.fenced
        self.leaving.install(watch_stdin=watch_stdin)

    def model_files(self, resumed_step: int | None) -> str:
        """Folder with config and tokenizer: the model's own, or the resumed checkpoint's where a made model is gone."""
        folder = model_folder(self.config.actor_rollout_ref.model.path, self.run)
        if not (folder / "config.json").is_file() and resumed_step is not None:
            folder = self.run.checkpoint(resumed_step) / layout.TOKENIZER_DIR
        return str(folder)

    def waive_exactness(self) -> bool:
        """Whether this run has accepted, in writing, that replayed steps may differ.

        A longer run with a constant learning rate takes the same steps, and a scheduler that is a function of the step
        is rebuilt as it was: those waivers promise no other bytes.
        """
        recorded = {field for waiver in self.record["waivers"] for field in waiver["fields"]}
        return waivers.gives_up_exactness(recorded | set(self._accepted()))

    def write_waivers(self, *used: str) -> None:
        """Put what this start has accepted into the record, once it has come so far that it counts.

        Args:
            used: names beside the contract's fields that took effect.
        """
        fields = [*self._accepted(), *used]
        if not fields or self.waivers_written:
            return
        self.waivers_written = True
        self.record["waivers"] = [
            *self.record.get("waivers", []), {"time": utc_now(), "attempt": self.attempt.number, "fields": fields}
        ]  # fmt: skip
        self.record["contract"] |= {drift.field: drift.now for drift in self.start.waived}
        self.attempt.check()
        write_json(self.run.record, self.record)

    def _accepted(self) -> list[str]:
        """Changed fields, and `exactness`, of which nobody can know beforehand whether it will be needed."""
        exactness = [name for name in self.config.resume.allow if name == waivers.EXACTNESS]
        return [drift.field for drift in self.start.waived] + exactness

    def _write_record(self) -> Record:
        """run.json, where it is missing: at the first start, and for a folder that was lost; config.yaml as it is now.

        What prunes, audits and uploads later goes by config.yaml. What was allowed this once does not belong there.
        """
        record = self.start.existing
        if record is None:
            record = {
                "run_id": uuid.uuid4().hex,
                "created": utc_now(),
                "keepstep": keepstep.__version__,
                "layout_version": layout.LAYOUT_VERSION,
                "contract": self.start.terms,
                "model": {"path": self.config.actor_rollout_ref.model.path, "files": self.start.model_files},
                "dataset": self.start.dataset,
                "waivers": [],
            }
        self.attempt.check()
        write_atomic(self.run.config, to_yaml(without_what_holds_once(self.config)).encode())
        if not self.run.has_record() or read_json(self.run.record) != record:
            # The second: another machine has brought it further, in the store.
            write_json(self.run.record, record)
        return record

    def log_start(self) -> None:
        logger.info(
            "Keepstep %s, attempt %d of run %s in %s",
            keepstep.__version__,
            self.attempt.number,
            self.record["run_id"],
            self.run.root,
        )
        log_config(self.config)
        logger.info("seed=%d python=%s host=%s", self.config.trainer.seed, platform.python_version(), platform.node())
        for check, sentence in self.start.checked.items():
            logger.info("check %s: %s", check, sentence)
        for warning in self.start.warnings:
            logger.warning(warning)
        self.events.emit(
            "attempt_started",
            total_steps=self.start.total_steps,
            seed=self.config.trainer.seed,
            checked=self.start.checked,
            flow_run=os.environ.get(FLOW_RUN_VARIABLE),
        )

    def classify(self, error: BaseException) -> KeepstepError:
        """Our error for whatever ended the attempt; a bug keeps its traceback in the log."""
        if isinstance(error, KeepstepError):
            return error
        if (asked := asked_to_leave(error)) is not None:
            return asked
        logger.error("unexpected failure", exc_info=error)
        if isinstance(error, OSError) and error.errno in NO_ROOM_ERRNOS:
            return NoRoomError(
                f"No room for {error.filename or self.run.root}: {error.strerror}.", "Free space, start again."
            )
        log = self.run.train_log(self.attempt.number)
        return BugError(f"{type(error).__name__}: {error}", f"The traceback is in {log}.")

    def tell(self, error: KeepstepError, outcome: Record) -> None:
        """Log and event of a failure; a disk that takes neither must not hide what happened."""
        kind = {"preempted": "preempted", "fenced": "fenced"}.get(error.failure_class, "failed")
        try:
            logger.error("%s", error)
            self.events.emit(kind, **{key: value for key, value in outcome.items() if key != "status"})
        except OSError as full:
            with contextlib.suppress(OSError):
                print(f"keepstep: the end of the attempt could not be written: {full}", file=sys.stderr)

    def _end_processes(self) -> None:
        """End what this attempt started, before its outcome is recorded."""
        end_attempt(self.run, self.attempt.number)
        if self.reaper.stdin is not None:
            self.reaper.stdin.close()
        self.reaper.wait(timeout=30)

    def close(self, outcome: Record) -> None:
        """End what it started, then record how it ended."""
        os.environ.pop(MARK_VARIABLE, None)
        if self.uploader is not None:
            self.uploader.close()
        self._end_processes()
        try:
            self.attempt.close(outcome)
        except OSError as full:
            # Raised, it would hide how the attempt ended.
            logger.error("the end of the attempt could not be recorded: %s", full)
        self.events.close()

    def _end_now(self, failure: KeepstepError) -> None:
        """Leave at once, from a signal or a watcher thread."""
        if self.uploader is not None:
            self.uploader.close()
        try:
            outcome = outcome_of(failure)
            self.tell(failure, outcome)
            with contextlib.suppress(OSError):
                # What `keepstep.cli.main` says of an error that comes up to it; a flow that was killed reads nothing.
                print(f"keepstep: {failure}", file=sys.stderr, flush=True)
            self.attempt.close(outcome)
        finally:
            self._end_processes()
            servers.release(self.run.platform, ProcessRef.current("controller"))


def outcome_of(error: KeepstepError) -> Record:
    """How an attempt that failed stands in attempts/<n>.json."""
    return {
        "status": "preempted" if isinstance(error, Preempted) else "failed",
        "class": error.failure_class,
        "message": error.message,
        "remedy": error.remedy,
        "retry": error.retry,
    }
