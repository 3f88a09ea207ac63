"""What is only shown: it never fails a run and never holds it up.

Concurrency:
  `in_background`   one daemon thread per call, which ends with its API call; nobody waits for it
  `RunPage`         one daemon thread from the first event to `close`; consumes "something happened", set by `heed`;
                    reads the run's folder and calls the API there alone; woken by an event, paced by `INTERVAL_S`
"""

from __future__ import annotations

import contextvars
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_run_logger

from keepstep.checkpoint.plan import ResumePlan
from keepstep.cli.report_command import extras
from keepstep.config.schema import RunConfig
from keepstep.doctor.evidence import gather, is_run
from keepstep.report.markdown import resume_rows, state
from keepstep.report.texts import duration_text
from keepstep.run import RunDir

Event = dict[str, Any]

PATIENCE_S = 10.0
INTERVAL_S = 10.0
"""Least time between two looks at the run for its page."""
MOST_TIME_SHARE = 0.05
"""Of the flow's time that the page may take: it is drawn more seldom when a long run takes long to read."""
PACE_STEPS = 20
NOT_FOUND = 404
_RENAMING = threading.Lock()


def publish(markdown: str, *, key: str, description: str) -> None:
    """Create a markdown artifact of the running task, if the API answers soon."""
    in_background(lambda: create_markdown_artifact(markdown, key=key, description=description)).join(PATIENCE_S)


def publish_decision(plan: ResumePlan) -> None:
    """Create the table of the resume decision, if the API answers soon."""
    in_background(
        lambda: create_table_artifact(
            resume_rows(plan),
            key="resume-decision",
            description="Every checkpoint in the order of preference, the one that was chosen, and why",
        )
    ).join(PATIENCE_S)


def rename_task_run(name: str) -> None:
    """Give the running task's run a name that says where it is."""
    context = TaskRunContext.get()
    if context is None:
        return
    # Every later state travels with the name its process knows, and would write the old one over the new.
    context.task_run.name = name
    in_background(lambda: _rename_on_server(context.task_run))


def _rename_on_server(task_run: TaskRun) -> None:
    """Give it the name that it has by now: of two of these threads the later one may come first."""
    deadline = time.monotonic() + PATIENCE_S
    with get_client(sync_client=True) as client:
        while True:
            try:
                with _RENAMING:
                    client.set_task_run_name(task_run.id, task_run.name)
                return
            except PrefectHTTPStatusError as error:
                # A task run travels to the server as an event and is not there at once.
                if error.response.status_code != NOT_FOUND or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)


def in_background(show: Callable[[], object]) -> threading.Thread:
    """Run `show` in a thread that knows which task this is; what it fails with is logged."""

    def guarded() -> None:
        try:
            show()
        except Exception as error:
            get_run_logger().warning("Not shown on the page: %s", type(error).__name__)

    # The client goes on trying for minutes when the API is away; the copied context tells it which task this is.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(guarded,), daemon=True)
    thread.start()
    return thread


class RunPage:
    """The state of a run on its flow run's page: one markdown artifact and the progress, kept up to date.

    Use as a context manager inside the flow. Every flow run has artifacts of its own under the run's keys, so that the
    page of a key shows the run through all of its flow runs.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._run = config, RunDir.at(config.trainer.output_dir)
        self._happened, self._closing = threading.Event(), threading.Event()
        self._step: Event | None = None
        self._seconds: list[float] = []
        self._markdown_id: UUID | None = None
        self._progress_id: UUID | None = None
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._keep,), daemon=True)

    def __enter__(self) -> RunPage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show the end, if the API answers soon."""
        self._closing.set()
        self._happened.set()
        self._thread.join(PATIENCE_S)

    def heed(self, event: Event) -> None:
        """Take note; nothing is read or called from here."""
        if event["event"] == "step":
            self._seconds = [*self._seconds[1 - PACE_STEPS :], event.get("seconds", 0.0)]
            self._step = event
        self._happened.set()

    def _keep(self) -> None:
        """The thread's work: a look after something happened, and one last when it is closed."""
        while self._happened.wait() and not self._closing.is_set():
            self._happened.clear()
            begin = time.monotonic()
            self._look()
            self._closing.wait(max(INTERVAL_S, (time.monotonic() - begin) / MOST_TIME_SHARE))
        self._look()

    def _look(self) -> None:
        try:
            self._show()
        except Exception as error:
            get_run_logger().warning("The page of the run is behind: %s", type(error).__name__)

    def _show(self) -> None:
        self._show_progress()
        if not is_run(self._run):
            # Refused before it began, or trained on a cluster whose disk is not seen from here.
            return
        markdown = state(gather(self._run), extras(self._run), links(self._config, self._run))
        if self._markdown_id is None:
            description = f"State of {self._run.root}"
            made = create_markdown_artifact(markdown, key=key_of(self._run), description=description)
            # A coroutine only where an event loop runs; this thread has none.
            self._markdown_id = cast(UUID, made)
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._markdown_id, ArtifactUpdate(data=markdown))

    def _show_progress(self) -> None:
        if self._step is None:
            return
        step, total = self._step["step"], self._step["total"]
        share, said = 100.0 * step / total, progress_text(step, total, self._seconds)
        if self._progress_id is None:
            made = create_progress_artifact(share, key=f"{key_of(self._run)}-steps", description=said)
            self._progress_id = cast(UUID, made)
        else:
            update_progress_artifact(self._progress_id, share, said)


def key_of(run: RunDir) -> str:
    """The artifact key of a run: its folder's name as far as a key may have it, and digits that tell it from others."""
    return f"run-{re.sub('[^a-z0-9]+', '-', run.default_s3_prefix.lower()).strip('-')}"


def progress_text(step: int, total: int, seconds: Sequence[float]) -> str:
    """Step of total and the time that is left, at the mean pace of `seconds`."""
    left_s = sum(seconds) / max(1, len(seconds)) * (total - step)
    return f"step {step} of {total}" + (f", {duration_text(left_s)} left" if step < total else "")


def links(config: RunConfig, run: RunDir) -> list[tuple[str, str]]:
    """Where else a run can be looked at."""
    found = [
        ("report as one file", f"keepstep report {run.root}"),
        ("TensorBoard", f"tensorboard --logdir {run.tensorboard}"),
        ("what is wrong with it", f"keepstep doctor {run.root}"),
    ]
    if config.ray.address:
        # A cluster's job server is its dashboard; the Ray of one machine has none.
        found.append(("Ray dashboard", config.ray.address))
    if config.s3.bucket:
        found.append(("store", f"s3://{config.s3.bucket}/{config.s3.prefix or run.default_s3_prefix}"))
    elif config.s3.embedded:
        found.append(("store, embedded", f"keepstep ls {run.root} --remote"))
    return found
