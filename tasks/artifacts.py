"""Artifacts are for display: they never fail a run and never hold it up."""

from __future__ import annotations

import contextvars
import threading

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

PATIENCE_S = 10.0


def publish(markdown: str, *, key: str, description: str) -> None:
    """Create a markdown artifact of the running task, if the API answers soon."""

    def create() -> None:
        try:
            create_markdown_artifact(markdown, key=key, description=description)
        except Exception as error:
            get_run_logger().warning("The artifact %s was not published: %s", key, type(error).__name__)

    # The client goes on trying for minutes when the API is away; the copied context tells it which task this is.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(create,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
