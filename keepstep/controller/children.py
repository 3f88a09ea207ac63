"""Short-lived helper processes of an attempt (verifier, uploader): recorded, time-limited, ended with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from keepstep.attempts import Attempt


@dataclass(frozen=True)
class ChildResult:
    """Exit status (negative: ended by that signal; None: ran past its limit and was ended) and what it printed."""

    status: int | None
    stdout: str
    stderr: str


def run_command(
    arguments: Sequence[str],
    *,
    attempt: Attempt,
    role: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    niceness: int = 0,
    on_line: Callable[[str], bool] = lambda line: False,
) -> ChildResult:
    """Run `keepstep <arguments>` as a process of this attempt and wait for it.

    Its standard input is a pipe that closes when this process dies; commands that take long watch it and leave.
    `on_line` sees each line of its standard error when it comes, in a thread of its own; one that it takes (True) is
    left out of the result.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "keepstep.cli.main", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        preexec_fn=(lambda: os.nice(niceness)) if niceness else None,
    )
    attempt.add(process.pid, role)
    assert process.stdin is not None
    assert process.stderr is not None
    kept: list[str] = []
    pipe, process.stderr = process.stderr, None
    reader = threading.Thread(target=_sift, args=(pipe, kept, on_line), name=f"{role}-lines", daemon=True)
    reader.start()
    try:
        # communicate() would close the pipe that tells the child that we live, so the pipe is taken out of its hands.
        watched, process.stdin = process.stdin, None
        with watched:
            stdout, _ = process.communicate(timeout=timeout_s)
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, _ = process.communicate(timeout=10)
        status = None
    reader.join(timeout=10)
    return ChildResult(status, stdout, "".join(kept))


def _sift(pipe: IO[str], kept: list[str], on_line: Callable[[str], bool]) -> None:
    with pipe:
        kept += [line for line in pipe if not on_line(line)]
