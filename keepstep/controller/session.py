"""One attempt, from the checks to its outcome. The order is: checks, lease, record, plan, start, train, finish.

run_attempt ── prepare (writes nothing) ── Attempt.acquire ── Session.execute ── outcome in attempts/<n>.json
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keepstep
from keepstep import reaper, waivers
from keepstep.attempts import FLOW_RUN_VARIABLE, MARK_VARIABLE, Attempt, end_attempt, mark
from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest
from keepstep.checkpoint.inventory import waiting_steps
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.plan import Rejection, ResumePlan
from keepstep.checkpoint.publish import point, quarantine, sweep_temporaries
from keepstep.checkpoint.repair import Fetch, from_disk, from_model, mend_reference
from keepstep.checkpoint.verify import verify
from keepstep.config.load import to_yaml, without_asked_checkpoint, without_what_holds_once
from keepstep.config.schema import RunConfig
from keepstep.controller.debugging import scratch
from keepstep.controller.finishing import finish
from keepstep.controller.leaving import Leaving, asked_to_leave
from keepstep.controller.reporting import log_config, logger, open_log
from keepstep.controller.uploader import Uploader
from keepstep.errors import (
    NO_ROOM_ERRNOS,
    BugError,
    CheckpointError,
    HeldError,
    KeepstepError,
    NoRoomError,
    Preempted,
    StorageError,
    StorageRefusedError,
)
from keepstep.events.log import EventLog, Listener, utc_now
from keepstep.platform import servers
from keepstep.preflight.lease import wait_until_free
from keepstep.preflight.model import model_folder
from keepstep.preflight.resume import make_plan
from keepstep.preflight.start import Start, prepare
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, write_atomic, write_json
from keepstep.storage.protocol import DamagedObjectError
from keepstep.storage.remote import object_key, sweep_downloads

if TYPE_CHECKING:
    from keepstep.controller.trainer import Trainer

Record = dict[str, Any]
NO_REFERENCE = "its reference is damaged, and neither this disk, nor the model, nor the store has it whole"
MAX_NUMBERS = 10
"""Attempt numbers that a start tries before it leaves the run to the other machines that start at the same time."""


def run_attempt(
    config: RunConfig,
    *,
    flow: ProcessRef | None = None,
    listeners: Sequence[Listener] = (),
    watch_stdin: bool = False,
    on_loop: Callable[[Trainer], None] = lambda _: None,
) -> Record:
    """Train `config`'s run to its end in this process and return result.json's content.

    Args:
        on_loop: given the loop before its first step.

    Raises:
        KeepstepError: how the attempt failed; it stands in attempts/<n>.json as well.
    """
    run = RunDir.at(config.trainer.output_dir)
    start: Start | None = None
    wait_until_free(run, config.retry, logger.warning)
    try:
        start = prepare(config)
        if config.trainer.debug:
            return debug_attempt(start, listeners, watch_stdin)
        attempt = acquire(start, flow)
        session = Session(start, attempt, listeners, watch_stdin)
        session.on_loop = on_loop
        return session.run_to_outcome()
    finally:
        if start is not None and start.remote is not None:
            start.remote.close()
        servers.release(run.platform, ProcessRef.current("controller"))


def debug_attempt(start: Start, listeners: Sequence[Listener], watch_stdin: bool) -> Record:
    """One step, in a folder of its own."""
    retry = start.config.retry
    with scratch(start) as aside:
        attempt = Attempt.acquire(
            aside.run, others=[], lease_timeout_s=retry.lease_timeout_s, heartbeat_s=retry.heartbeat_s
        )
        return Session(aside, attempt, listeners, watch_stdin).run_to_outcome()


def acquire(start: Start, flow: ProcessRef | None) -> Attempt:
    """Take the next attempt number, in the run's folder and then in the store (`storage.lease` says why so)."""
    config, remote = start.config, start.remote
    for _ in range(MAX_NUMBERS):
        attempt = Attempt.acquire(
            start.run,
            others=([flow] if flow else []) + start.servers,
            lease_timeout_s=config.retry.lease_timeout_s,
            heartbeat_s=config.retry.heartbeat_s,
            at_least=(remote.highest_attempt() if remote else 0) + 1,
        )
        try:
            if remote is None or remote.claim_attempt(start.run, attempt.number):
                return attempt
            taken = HeldError(f"Attempt {attempt.number} is taken in the store by another machine.", "Start again.")
        except StorageRefusedError as error:
            attempt.close(outcome_of(error))
            raise
        except StorageError as error:
            start.warnings.append(f"The attempt's number is not in the store yet: {error.message}")
            return attempt
        attempt.close(outcome_of(taken))
    raise taken


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

    def run_to_outcome(self) -> Record:
        """`execute`, with the outcome recorded however it ends and no process left behind."""
        # What stands if even recording the failure fails.
        outcome: Record = {"status": "failed", "class": "bug", "message": "ended without a word", "retry": True}
        try:
            result = self.execute()
            self.leaving.ending = True
            outcome = {"status": "finished", "step": result["final_step"]}
            self.events.emit("finished", step=result["final_step"], result=result)
            return result
        except BaseException as error:
            self.leaving.ending = True
            failure = self._classify(error)
            outcome = outcome_of(failure)
            self._tell(failure, outcome)
            raise failure from error
        finally:
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

    def execute(self) -> Record:
        """The attempt itself."""
        self._log_start()
        sweep_temporaries(self.run, self.attempt.check)
        chosen = self._take_up()
        if self.config.trainer.debug:
            from keepstep.controller.training import train

            train(self, chosen)
            return {"debug": True, "final_step": (chosen.step or 0) + 1}
        if self.config.s3_enabled:
            self.uploader = Uploader(self.run, self.config, self.attempt, self.events, self.start.environment)
            for step in waiting_steps(self.config, self.run, self.start.total_steps):
                self.uploader.add(step)
        if (chosen.step or 0) < self.start.total_steps:
            from keepstep.controller.training import train

            train(self, chosen)
        self.write_waivers()
        return finish(self)

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
        if not self.run.has_record():
            write_json(self.run.record, record)
        return record

    def _log_start(self) -> None:
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

    def _take_up(self) -> ResumePlan:
        """Act on the plan: set aside what failed its verification, fetch the choice from the store if need be."""
        # Aside first: the store's copy of a damaged step goes where that one stands.
        self._set_aside(self.start.plan.rejections)
        chosen = self._make_ready(self.start.plan)
        self._set_aside(chosen.rejections[len(self.start.plan.rejections) :])
        self.attempt.check()
        sweep_downloads(self.run)
        for sentence in chosen.describe():
            logger.info(sentence)
        if chosen.step is not None:
            if not chosen.rebuild_scheduler:
                self.events.emit("checkpoint_verified", step=chosen.step)
            if not self.run.latest_link.exists() and not chosen.rebuild_scheduler:
                point(self.run.latest_link, self.run, chosen.step, self.attempt.check)
            folder = self.run.checkpoint(chosen.step)
            self.events.emit("resumed", step=chosen.step, checkpoint=str(folder), plan=chosen.to_record())
        return chosen

    def take_up_again(self) -> ResumePlan:
        """Plan anew within the attempt, whose ranks were lost, and act on it."""
        sweep_temporaries(self.run, self.attempt.check)
        # One checkpoint is asked for at the beginning of a start, not for what follows from it.
        self.config = without_asked_checkpoint(self.config)
        self.start.plan = self._plan_again([])
        return self._take_up()

    def _set_aside(self, rejections: Sequence[Rejection]) -> None:
        for rejection in rejections:
            self.events.emit(
                "checkpoint_rejected", step=rejection.step, source=rejection.source, reason=rejection.reason
            )
            folder = self.run.checkpoint(rejection.step)
            if rejection.source == "local" and folder.exists():
                quarantine(self.run, folder, rejection.step, "failed-verification", self.attempt.check)

    def _make_ready(self, chosen: ResumePlan) -> ResumePlan:
        """Have the choice whole on disk; one that cannot be is passed over for the next best."""
        while chosen.step is not None and (problem := self._obstacle(chosen, chosen.step)):
            passed_over = [*chosen.rejections, Rejection(chosen.step, chosen.source or "local", problem)]
            chosen = self._plan_again(passed_over)
        return chosen

    def _obstacle(self, chosen: ResumePlan, step: int) -> str:
        """Fetch or mend what was chosen; why that did not succeed, or nothing."""
        if chosen.repair:
            return "" if self._mend(step) else NO_REFERENCE
        if chosen.source == "s3":
            try:
                self.start.remote.download(step, self.run, self.attempt.check, self.events.sign_of_life)
            except (CheckpointError, DamagedObjectError) as error:
                return error.message
            self.events.emit("checkpoint_downloaded", step=step)
        return ""

    def _mend(self, step: int) -> bool:
        """Mend the reference of a step that is whole otherwise; whether it verifies now."""
        manifest = parse((self.run.checkpoint(step) / layout.MANIFEST).read_bytes())
        model_dir = model_folder(self.config.actor_rollout_ref.model.path, self.run)
        sources = {"disk": from_disk(self.run), "model": from_model(model_dir, manifest)}
        if self.start.remote is not None:
            sources["store"] = self._from_store(step)
        mended = mend_reference(self.run, manifest, sources, self.attempt.check)
        for name, source in mended.items():
            self.events.emit("reference_mended", step=step, file=name, source=source)
        return verify(self.run.checkpoint(step), expected_run_id=manifest.run_id, expected_step=step).resumable

    def _from_store(self, step: int) -> Fetch:
        def fetch(name: str, digest: FileDigest, target: Path) -> bool:
            try:
                self.start.remote.store.get_file(object_key(step, name, digest), target, digest)
            except StorageError as error:
                logger.warning("%s is not to be had from the store: %s", name, error.message)
                return False
            return True

        return fetch

    def _plan_again(self, passed_over: Sequence[Rejection]) -> ResumePlan:
        start = self.start

        def planned(remote: Any) -> ResumePlan:
            return make_plan(self.config, self.run, remote, self.record, start.total_steps, passed_over)

        try:
            return planned(start.remote)
        except StorageError as error:
            if not error.retry or not self.run.steps():
                raise
            logger.warning("the store does not answer (%s): planning from local checkpoints alone", error.message)
            return planned(None)

    def _classify(self, error: BaseException) -> KeepstepError:
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

    def _tell(self, error: KeepstepError, outcome: Record) -> None:
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

    def _end_now(self, failure: KeepstepError) -> None:
        """Leave at once, from a signal or a watcher thread."""
        try:
            outcome = outcome_of(failure)
            self._tell(failure, outcome)
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
