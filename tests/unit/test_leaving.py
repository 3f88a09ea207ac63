"""Being asked to leave: by a signal or from a thread, during start-up and in a step; limits on code that hangs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from keepstep.controller.leaving import Leaving, StepDropped, asked_to_leave
from keepstep.errors import FencedError, Preempted

# The end of a grace ends this process: none of these comes to it.
HOUR_S = 3600.0


def leaving() -> Leaving:
    return Leaving(24 * HOUR_S, lambda failure: None)


def test_start_up_is_left_at_the_next_wait():
    found = leaving()
    found.check()
    assert found.remaining_s() == float("inf")
    found.ask("a node drains")
    assert found.heed()
    with pytest.raises(Preempted):
        found.check()


def test_a_step_goes_on_until_it_would_not_end_in_time():
    found = leaving()
    asked_of: list[float] = []
    found.training = True
    found.drops = lambda remaining_s: asked_of.append(remaining_s) or len(asked_of) > 1  # type: ignore[func-returns-value]
    found.ask("SIGTERM")
    found.check()
    with pytest.raises(StepDropped):
        found.check()
    assert 23 * HOUR_S < asked_of[0] <= 24 * HOUR_S


def test_the_earlier_of_two_ends_counts():
    found = leaving()
    found.ask("a node drains", grace_s=48 * HOUR_S)
    assert 47 * HOUR_S < found.remaining_s() <= 48 * HOUR_S
    found.ask("SIGTERM")
    found.ask("a node drains", grace_s=36 * HOUR_S)
    assert 23 * HOUR_S < found.remaining_s() <= 24 * HOUR_S


def test_a_thread_beside_the_loop_only_minds_the_fence():
    found = leaving()
    found.fenced = threading.Event()
    found.ask("SIGTERM")
    found.check_fence()
    found.fenced.set()
    with pytest.raises(FencedError):
        found.check_fence()


PROGRAM = """
import os, signal, sys, time
from keepstep.controller.leaving import Leaving
from keepstep.errors import NoProgressError, Preempted

def end_now(failure):
    print("ended:", failure.message, flush=True)

leaving = Leaving({grace}, end_now)
leaving.take_signals()
{body}
"""


def run(body: str, grace: float = 30.0) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(grace=grace, body=body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_signal_interrupts_start_up_wherever_it_waits():
    """C155: the notice comes in a wait that nobody polls."""
    done = run(
        "try:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    time.sleep(50)\n"
        "except Preempted as error:\n"
        "    print('left:', error.message)"
    )
    assert done.stdout == "left: Asked to leave while no step was running.\n", done.stderr


def test_a_signal_interrupts_no_step_and_no_ending():
    for phase in ("training", "ending"):
        done = run(f"leaving.{phase} = True\nsignal.raise_signal(signal.SIGTERM)\nprint(leaving.heed())")
        assert done.stdout == "True\n", done.stderr


def test_a_second_signal_ends_it_at_once():
    done = run("leaving.training = True\nsignal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stdout) == (75, "ended: Asked to leave twice: left at once.\n"), done.stderr


def test_the_signal_that_follows_a_drain_is_the_first_one():
    done = run("leaving.training = True\nleaving.ask('drain')\nsignal.raise_signal(signal.SIGTERM)\nprint('saving')")
    assert (done.returncode, done.stdout) == (0, "saving\n"), done.stderr


def test_the_end_of_the_grace_ends_it():
    done = run("leaving.training = True\nsignal.raise_signal(signal.SIGTERM)\ntime.sleep(50)", grace=0.2)
    assert done.returncode == 75
    assert done.stdout == "ended: Asked to leave (SIGTERM): no end within 0 s of grace.\n"


def test_code_that_never_returns_ends_the_attempt():
    body = (
        "leaving.training = True\n"
        "with leaving.limit(5.0, lambda: NoProgressError('too early')):\n"
        "    pass\n"
        "with leaving.limit(0.2, lambda: NoProgressError('the reward function hangs')):\n"
        "    time.sleep(50)"
    )
    done = run(body)
    assert (done.returncode, done.stdout) == (1, "ended: the reward function hangs\n"), done.stderr


def test_a_notice_is_known_in_the_shapes_that_it_takes():
    """Raised inside compiled code, and by Ray's own handler; nothing else counts as one."""
    try:
        try:
            raise Preempted("asked")
        except Preempted as notice:
            raise SystemError("CoreWorker.wait returned a result with an exception set") from notice
    except SystemError as error:
        found = asked_to_leave(error)
    assert found is not None and found.message == "asked"
    assert isinstance(asked_to_leave(SystemExit(15)), Preempted)
    for other in (SystemExit(1), SystemError("another"), RuntimeError("bug")):
        assert asked_to_leave(other) is None
