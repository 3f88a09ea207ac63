"""The training flow: check_dataset -> preflight -> plan_resume -> train_grpo -> finish; verify and upload beside it.

Concurrency:
  main thread       dispatches: consumes the trainer's events from a local queue, submits task runs, waits for nothing
                    but that queue; woken by an event or by the end of `train_grpo` (None)
  train_grpo        one pool thread; produces the events; ends within `retry.term_grace_s` once `stop` is set
  verify, upload    one pool thread each; wait for a local future that the main thread resolves
  the page          one daemon thread; looks at the run after events, at its own pace (`tasks.artifacts.RunPage`)
No call to the Prefect API is made between two steps of the training, so an API that goes away holds nothing up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.futures import wait as wait_for_futures
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.form import TrainingForm
from keepstep.attempts import FLOW_RUN_VARIABLE
from keepstep.checkpoint.inventory import goes_to_store
from keepstep.cli.doctor_command import describe as describe_run
from keepstep.cli.progress import ProgressPrinter, describe
from keepstep.config.load import as_overrides, load, without_asked_checkpoint
from keepstep.config.schema import RunConfig
from keepstep.controller.uploader import NOT_OWED
from keepstep.doctor.evidence import gather, is_run
from keepstep.doctor.rules import examine
from keepstep.errors import CheckpointError, HeldError, KeepstepError, StorageError, WorkerDiedError
from keepstep.preflight.complete import complete_result
from keepstep.preflight.lease import wait_until_free
from keepstep.retry import NOT_RETRYABLE, RETRIES_EXHAUSTED, Decision, pauses_s
from keepstep.retry_budget import RetryBudget
from keepstep.run import RunDir
from tasks.artifacts import RunPage, publish
from tasks.checkpoints import upload_checkpoint, verify_checkpoint
from tasks.dataset import check_dataset
from tasks.finishing import export_last_step, finish
from tasks.preflight import preflight
from tasks.resume import plan_resume
from tasks.training import Attempts, with_retries

Event = dict[str, Any]

# One thread trains; the others show verifications and uploads, which wait for nothing but local futures.
NUM_THREADS = 32
LAST_TASKS_TIMEOUT_S = 60.0


def settings_of(
    config: str = "quickstart",
    overrides: dict[str, Any] = {},  # noqa: B006
    form: TrainingForm | None = None,
) -> RunConfig:
    """The flow's parameters, with its defaults, as a configuration; `overrides` win over the form.

    Raises:
        ConfigError: they are none.
    """
    return load(config, as_overrides((form.to_overrides() if form else {}) | overrides))


def run_name() -> str:
    """`<run>-<attempt>`, e.g. `quickstart-3`: the run's folder, and the attempt that comes next in it.

    A flow run that is run again keeps its name, and so does one whose parameters the flow itself will refuse.
    """
    if flow_run.run_count:
        return str(flow_run.name)
    try:
        # A deployment passes on what was given, without the flow's defaults.
        config = settings_of(**flow_run.parameters)
    except KeepstepError:
        return str(flow_run.name)
    run = RunDir.at(config.trainer.output_dir)
    return f"{run.root.name}-{max(run.attempt_numbers(), default=0) + 1}"


# Prefect's types are invariant where they need not be: it takes its own task runner for another one.
RUNNER: Any = ThreadPoolTaskRunner(max_workers=NUM_THREADS)


@flow(name="grpo-train", flow_run_name=run_name, task_runner=RUNNER)
def grpo_train(
    config: str = "quickstart",
    overrides: dict[str, Any] = {},  # noqa: B006
    form: TrainingForm | None = None,
) -> Any:
    """Train a run to its end, or go on with it. Success: the last step is reached, verified and, with a store, there.

    Args:
        config: name of a packaged configuration, or path of a YAML file.
        overrides: dotted key to value, e.g. {"trainer.total_training_steps": 40}.
        form: what is set most often, as fields of the deployment's page; `overrides` win over it.
    """
    try:
        settings = settings_of(config, overrides, form)
    except KeepstepError as error:
        # Raised, it would stand in the log twice over with its traceback, and the state would bear no name.
        return Failed(name=NOT_RETRYABLE, message=str(error), data=error)
    done = complete_result(settings)
    if done is not None:
        get_run_logger().info("%s is complete at step %d", settings.trainer.output_dir, done["final_step"])
        return exported(settings, done)
    run = RunDir.at(settings.trainer.output_dir)
    os.environ[FLOW_RUN_VARIABLE] = str(flow_run.name)
    budget = RetryBudget(run, str(flow_run.id), settings.retry)
    attempts = Attempts(settings, budget)
    with RunPage(settings) as page:
        try:
            attempts.check_budget()
            if budget.has_resumed:
                settings = without_asked_checkpoint(settings)
            wait_until_free(run, settings.retry, get_run_logger().info)
            total_steps = checked(settings, attempts)
            return exported(settings, finish(settings, train(settings, total_steps, attempts, page)))
        except KeepstepError as error:
            if not isinstance(error, HeldError):
                # Of a run that another one holds nothing was used up, and nothing is written into it.
                with contextlib.suppress(OSError):
                    # A full disk, for which the start is refused perhaps.
                    budget.start_over()
            return failed(error, attempts.decision, run)


def checked(config: RunConfig, attempts: Attempts) -> int:
    """Make the checks before the first attempt; the steps of the run.

    A store that is away is asked again, as often as an attempt would be made: a run that comes back on another machine
    needs it first of all, and that machine's network may be as young.
    """
    pauses = pauses_s(config.retry)
    while True:
        try:
            check_dataset(config)
            total_steps, plan = preflight(config)
            plan_resume(plan)
            return total_steps
        except StorageError as error:
            if not error.retry:
                raise
            if (pause_s := next(pauses, None)) is None:
                attempts.decision = Decision(False, "no tries are left", name=RETRIES_EXHAUSTED)
                raise
            get_run_logger().warning("%s Asked again in %.0f s.", error.message, pause_s)
            time.sleep(pause_s)


def exported(config: RunConfig, result: Event) -> Any:
    """The result of a run that is done, with its last step exported where `export.enable` asks for it."""
    if not config.export.enable:
        return result
    try:
        return result | {"export": export_last_step(config, result)}
    except KeepstepError as error:
        return failed(error, None, RunDir.at(config.trainer.output_dir))


def failed(error: KeepstepError, decision: Decision | None, run: RunDir) -> State[Any]:
    """The state of a run that no other attempt can help, named after why; with what the doctor says.

    A crashed flow run is run again by the automation that ships; one that failed is not.
    """
    name = decision.name if decision is not None and decision.name else NOT_RETRYABLE
    # Of a run that somebody else trains it would tell how that goes.
    held = isinstance(error, HeldError)
    diagnosis = "\n".join(describe_run(examine(gather(run)), run)) if is_run(run) and not held else ""
    if diagnosis:
        get_run_logger().error("%s\n%s", name, diagnosis)
        publish(f"```\n{diagnosis}\n```", key="diagnosis", description="What `keepstep doctor` says of the end")
    reason = f" ({decision.reason})" if decision is not None and decision.reason else ""
    return Failed(name=name, message=f"{error}{reason}", data=error)


def train(config: RunConfig, total_steps: int, attempts: Attempts, page: RunPage) -> Event:
    """Submit `train_grpo` and dispatch its events until it ends; return result.json's content.

    Raises:
        KeepstepError: how the last attempt failed.
        TerminationSignal, KeyboardInterrupt: asked to leave; the trainer has saved and left.
    """
    events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
    stop = threading.Event()
    checkpoints = CheckpointTasks(config, total_steps)
    show = ProgressPrinter()
    training: PrefectFuture[Event] | None = None
    try:
        training = with_retries(attempts, stop).submit(config, attempts, events.put, stop)
        training.add_done_callback(lambda _: events.put(None))
        while (event := events.get()) is not None:
            show(event)
            page.heed(event)
            if text := describe(event):
                get_run_logger().info(text)
            checkpoints.heed(event)
        checkpoints.close()
        result: Event = training.result()
        return result
    except (TerminationSignal, KeyboardInterrupt):
        # A second signal must not cut the save short: the grace period is bounded already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop.set()
        if training is not None:
            training.wait(timeout=config.retry.term_grace_s + 20.0)
        while not events.empty() and (event := events.get()) is not None:
            show(event)
        raise
    finally:
        stop.set()
        checkpoints.close()


class CheckpointTasks:
    """The task runs that show what happens to checkpoints. Used by the main thread alone."""

    def __init__(self, config: RunConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._verifications: dict[int, Future[Event]] = {}
        self._uploads: dict[int, Future[Event]] = {}
        self._submitted: list[PrefectFuture[Any]] = []

    def heed(self, event: Event) -> None:
        """Begin or end the task runs that this event is about."""
        kind, step = event["event"], event.get("step", -1)
        if kind == "checkpoint_saved":
            self._verify(step)
        elif kind == "checkpoint_verified" and step in self._verifications:
            _resolve(self._verifications.pop(step), event)
            if goes_to_store(self._config, step, self._total_steps):
                self._upload(step)
        elif kind == "checkpoint_rejected" and event.get("source") != "s3":
            # Of the store's copy nothing follows for the one here, which may be on its way there.
            for waiting in (self._verifications, self._uploads):
                if step in waiting:
                    _fail(waiting.pop(step), CheckpointError(f"Step {step} was rejected: {event['reason']}"))
        elif kind == "upload_failed" and event["class"] == NOT_OWED and step in self._uploads:
            _fail(self._uploads.pop(step), CheckpointError(f"Step {step} is not uploaded: {event['reason']}"))
        elif kind == "checkpoint_uploaded":
            # An attempt also uploads what an earlier one owed, of which nothing else was heard.
            _resolve(self._upload(step), event)
        elif kind == "attempt_started":
            self._end(self._verifications, "the attempt that saved it ended first")

    def close(self) -> None:
        """No more events: end what still waits, and wait until it has ended."""
        self._end(self._verifications, "the attempt that saved it ended first")
        self._end(self._uploads, "the flow ended first; the next start uploads it")
        wait_for_futures(self._submitted, timeout=LAST_TASKS_TIMEOUT_S)
        self._submitted = []

    def _verify(self, step: int) -> None:
        confirmed: Future[Event] = Future()
        self._verifications[step] = confirmed
        timeout_s = 2 * self._config.checkpoint.verify_timeout_s
        self._submitted.append(verify_checkpoint.submit(step, confirmed, timeout_s))

    def _upload(self, step: int) -> Future[Event]:
        if step not in self._uploads:
            self._uploads[step] = Future()
            self._submitted.append(upload_checkpoint.submit(step, self._uploads[step], None))
        return self._uploads[step]

    def _end(self, waiting: dict[int, Future[Event]], reason: str) -> None:
        for step, confirmed in waiting.items():
            _fail(confirmed, WorkerDiedError(f"Step {step}: {reason}."))
        waiting.clear()


def _resolve(confirmed: Future[Event], event: Event) -> None:
    if not confirmed.done():
        confirmed.set_result(event)


def _fail(confirmed: Future[Event], error: KeepstepError) -> None:
    if not confirmed.done():
        confirmed.set_exception(error)
