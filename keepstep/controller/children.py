"""Short-lived helper processes of an attempt (verifier, uploader): recorded, time-limited, ended with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
) -> ChildResult:
    """Run `keepstep <arguments>` as a process of this attempt and wait for it.

    Its standard input is a pipe that closes when this process dies; commands that take long watch it and leave.
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
    try:
        # communicate() would close the pipe that tells the child that we live, so the pipe is taken out of its hands.
        watched, process.stdin = process.stdin, None
        with watched:
            stdout, stderr = process.communicate(timeout=timeout_s)
        return ChildResult(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=10)
        return ChildResult(None, stdout, stderr)
