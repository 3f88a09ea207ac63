"""What is only shown: it never fails a run and never holds it up."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.logging import get_run_logger

PATIENCE_S = 10.0
NOT_FOUND = 404


def publish(markdown: str, *, key: str, description: str) -> None:
    """Create a markdown artifact of the running task, if the API answers soon."""
    in_background(lambda: create_markdown_artifact(markdown, key=key, description=description)).join(PATIENCE_S)


def rename_task_run(name: str) -> None:
    """Give the running task's run a name that says where it is."""
    context = TaskRunContext.get()
    if context is None:
        return
    # Every later state travels with the name its process knows, and would write the old one over the new.
    context.task_run.name = name
    in_background(lambda: _rename_on_server(context.task_run.id, name))


def _rename_on_server(task_run_id: UUID, name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with get_client(sync_client=True) as client:
        while True:
            try:
                client.set_task_run_name(task_run_id, name)
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
