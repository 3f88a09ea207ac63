"""Saving behind the loop: snapshot, write, verify, publish the pointer, retire old ones, queue the upload.

Concurrency:
  loop -> saver thread   one save in flight; the next `save` waits for it and says how long it waited
  saver thread           consumes one save; waits for the writer (checkpoint.save_timeout_s) and the verifier
                         (checkpoint.verify_timeout_s); produces events and verified steps for the uploader
  failures               are raised in the loop, at its next `raise_if_failed` or `save`
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any

from keepstep.attempts import Attempt
from keepstep.checkpoint.cadence import last_due
from keepstep.checkpoint.history import verified_steps
from keepstep.checkpoint.inventory import decide_for, goes_to_store, is_confirmed, layout_of, retire
from keepstep.checkpoint.publish import point, quarantine
from keepstep.checkpoint.written import SaveRequest, SaveResult
from keepstep.config.schema import RunConfig
from keepstep.controller.children import run_command
from keepstep.controller.groups import RankGroup
from keepstep.controller.reporting import logger
from keepstep.controller.state import TrainState
from keepstep.controller.uploader import Uploader
from keepstep.controller.writers import FullWriter, ShardWriters, Snapshots
from keepstep.errors import CheckpointError, NoProgressError, NoRoomError, WorkerDiedError
from keepstep.events.log import EventLog
from keepstep.run import RunDir

Writers = FullWriter | ShardWriters
MAX_FAILURES_IN_A_ROW = 2
CLOSE_TIMEOUT_S = 10.0


@dataclass
class SaveContext:
    """What every save of an attempt has in common."""

    run: RunDir
    run_id: str
    config: RunConfig
    config_yaml: str
    model_files: str
    num_rows: int
    has_reference: bool
    total_steps: int
    resumed_step: int | None
    waive_exactness: bool = False


@dataclass
class Saver:
    context: SaveContext
    attempt: Attempt
    events: EventLog
    uploader: Uploader | None
    start_writers: Callable[[], Writers]
    writers: Writers
    last_saved: int | None = None
    lasted_s: float | None = None
    """From the snapshot to the verified checkpoint, the last time; None before the first."""
    wanted: bool = False
    """A save failed its verification: save again at the next step."""
    _in_flight: Future[None] | None = None
    _num_failures: int = 0
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="saver"))

    def save(self, state: TrainState, ranks: RankGroup) -> None:
        """Copy the ranks' state to host memory and hand it on. Returns when the copies are taken."""
        waited_s = self.wait()
        self.attempt.check()
        config = self.context.config
        reference_step = self._reference_step(state.global_step)
        with_reference = self.context.has_reference and reference_step is None
        shared = self.writers.shares_memory_with([identity["host"] for identity in ranks.identities])
        snapshots = Snapshots(ranks.snapshots(shared), ranks.reference_snapshots() if with_reference else [])
        ranks.await_copies(snapshots.ranks, snapshots.reference)
        request = SaveRequest(
            run_root=str(self.context.run.root),
            run_id=self.context.run_id,
            attempt=self.attempt.number,
            step=state.global_step,
            world_size=config.world_size,
            has_reference=self.context.has_reference,
            reference_step=reference_step,
            trainer_state=state.to_record(self.context.num_rows),
            config_yaml=self.context.config_yaml,
            model_files=self.context.model_files,
            engine_state={
                "weight_version": state.global_step,
                "temperature": config.actor_rollout_ref.rollout.temperature,
            },
            layout=config.checkpoint.layout,
            waive_exactness=self.context.waive_exactness,
        )
        self.wanted = False
        self.last_saved = state.global_step
        self._in_flight = self._thread.submit(self._publish, request, snapshots, waited_s)

    def wait(self) -> float:
        """Wait for the save in flight, raise its failure, return the seconds waited."""
        begin = time.monotonic()
        if self._in_flight is not None:
            checkpoint = self.context.config.checkpoint
            timeout_s = 2 * (checkpoint.save_timeout_s + checkpoint.verify_timeout_s)
            try:
                self._in_flight.result(timeout=timeout_s)
            except TimeoutError as error:
                raise NoProgressError(f"The save in flight did not end within {timeout_s:.0f} s.") from error
            self._in_flight = None
        return time.monotonic() - begin

    def start_over(self, step: int | None) -> None:
        """The loop goes on from this verified step with other ranks; None: from the beginning."""
        self.last_saved, self.wanted, self._in_flight = step, False, None
        self.context.resumed_step = step

    def close(self) -> None:
        """No more saving: the attempt ends. A save in flight is given a moment; what it leaves is swept later."""
        self._closing.set()
        if self._in_flight is not None:
            wait_for_futures([self._in_flight], timeout=CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def raise_if_failed(self) -> None:
        """Raise what the save in flight failed with, without waiting for one that goes on."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def _publish(self, request: SaveRequest, snapshots: Snapshots, waited_s: float) -> None:
        begin = time.monotonic()
        try:
            result = self._write(request, snapshots)
        except NoRoomError as error:
            self._skip(request.step, error)
            return
        fields: dict[str, Any] = {"num_bytes": result.num_bytes, "write_s": round(time.monotonic() - begin, 3)}
        fields |= {"waited_s": round(waited_s, 3)} if waited_s > 0.001 else {}
        fields |= {"quarantined": result.quarantined} if result.quarantined else {}
        self.events.emit("checkpoint_saved", step=request.step, outcome=result.outcome, **fields)
        reasons = self._verify(request.step)
        if reasons:
            self._reject(request.step, reasons)
            return
        self._num_failures = 0
        self.lasted_s = time.monotonic() - begin
        point(self.context.run.latest_link, self.context.run, request.step, self.attempt.check)
        self._retire(request.step)
        if self.uploader is not None and self._goes_to_store(request.step):
            self.uploader.add(request.step)

    def _write(self, request: SaveRequest, snapshots: Snapshots) -> SaveResult:
        """Let the writers write; when one dies they are started again and write the same snapshots."""
        timeout_s = self.context.config.checkpoint.save_timeout_s
        for last_try in (False, True):
            try:
                return self.writers.save(request, snapshots, timeout_s)
            except WorkerDiedError:
                if last_try or self._closing.is_set():
                    raise
                self.events.emit("worker_lost", role="writer", step=request.step)
                self.writers.end()
                self.writers = self.start_writers()
                self.events.emit("recovered", role="writer", step=request.step)
        raise AssertionError("unreachable")

    def _skip(self, step: int, error: NoRoomError) -> None:
        """Go on without this save where the configuration says so; the last one of a run is never given up."""
        if self.context.config.checkpoint.on_no_room == "stop" or step == self.context.total_steps:
            raise error
        self.last_saved = None
        self.events.emit("checkpoint_skipped", step=step, reason=error.message)
        logger.warning("step %d is NOT saved (checkpoint.on_no_room=skip): %s", step, error.message)

    def _verify(self, step: int) -> list[str]:
        """Reasons against the published checkpoint, read back from disk by a process of its own; none: it is good."""
        folder = self.context.run.checkpoint(step)
        begin = time.monotonic()
        for last_try in (False, True):
            found = run_command(
                ["verify", str(folder), "--json"],
                attempt=self.attempt,
                role="verifier",
                timeout_s=self.context.config.checkpoint.verify_timeout_s,
            )
            if found.status == 0:
                read_from = json.loads(found.stdout)["read_from"]
                verify_s = round(time.monotonic() - begin, 3)
                self.events.emit("checkpoint_verified", step=step, verify_s=verify_s, read_from=read_from)
                return []
            if found.status == 1 and found.stdout.strip():
                return json.loads(found.stdout)["reasons"]
            if found.status is None:
                limit_s = self.context.config.checkpoint.verify_timeout_s
                raise NoProgressError(
                    f"The verification of step {step} did not end within {limit_s:.0f} s.",
                    "A slow disk needs a longer checkpoint.verify_timeout_s.",
                )
            if last_try or self._closing.is_set():
                raise WorkerDiedError(
                    f"The verifier of step {step} ended with {found.status}: {found.stderr.strip()[-300:]}"
                )
        raise AssertionError("unreachable")

    def _reject(self, step: int, reasons: list[str]) -> None:
        run = self.context.run
        self._num_failures += 1
        self.wanted = True
        moved = quarantine(run, run.checkpoint(step), step, "failed-verification", self.attempt.check)
        self.events.emit("checkpoint_rejected", step=step, reason="; ".join(reasons), quarantined=str(moved))
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise CheckpointError(
                f"{self._num_failures} checkpoints in a row failed their verification, "
                f"the last at step {step}: {reasons[0]}",
                f"The disk under {run.checkpoints} damages what is written to it; look at {run.quarantine}.",
            )

    def _retire(self, newest: int) -> None:
        """Point `best` to the best checkpoint that stays, and delete those that no rule keeps."""
        run, checkpoint = self.context.run, self.context.config.checkpoint
        config = self.context.config
        waiting = {step for step in run.steps() if self._goes_to_store(step) and not is_confirmed(config, run, step)}
        in_use = (self.context.resumed_step, self.uploader.current if self.uploader else None)
        decision = decide_for(
            run,
            checkpoint,
            run_id=self.context.run_id,
            verified=verified_steps(run) | {newest},
            waiting=frozenset(waiting),
            in_use=frozenset(step for step in in_use if step is not None),
        )
        retire(
            run, decision, self.attempt.check,
            lambda step, reason: self.events.emit("checkpoint_pruned", step=step, reason=reason),
        )  # fmt: skip

    def _goes_to_store(self, step: int) -> bool:
        return goes_to_store(self.context.config, step, self.context.total_steps)

    def _reference_step(self, saved: int) -> int | None:
        """A verified step on disk, of the same layout, whose reference the save of this step can link."""
        # After a save that failed its verification the shared file itself may be damaged: written anew.
        if not self.context.has_reference or self.wanted:
            return None
        run, kind = self.context.run, self.context.config.checkpoint.layout
        every = self.context.config.actor_rollout_ref.ref.refresh_freq
        verified = verified_steps(run) | {self.context.resumed_step}
        same = (
            step
            for step in reversed(run.steps())
            if step in verified and last_due(step, every) == last_due(saved, every) and layout_of(run, step) == kind
        )
        return next(same, None)
