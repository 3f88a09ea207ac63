"""Looking at a run while a save goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.checkpoint.plan import plan
from keepstep.checkpoint.verify import verify
from keepstep.run import RunDir
from tests.unit import builder


def test_a_save_that_goes_on_is_never_taken(tmp_path: Path) -> None:
    """C67: the writer is stopped again and again; who looks meanwhile sees the step before, or the whole new one."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    # The model's folder and the request are made before, so that the child does nothing but save.
    builder.request(run, 40)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            builder.write(run, 40)
            status = 0
        finally:
            os._exit(status)
    try:
        status, num_half = look_until_it_ends(run, child)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert os.waitstatus_to_exitcode(status) == 0
    assert num_half > 0, "nobody looked while the save went on"
    assert plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None).step == 40


def look_until_it_ends(run: RunDir, child: int) -> tuple[int, int]:
    """(the child's wait status, how often it was seen half-way)."""
    num_half, seen = 0, names(run)
    while True:
        # Every file that appears is an instant to look at.
        while (there := names(run)) == seen and not has_ended(child):
            os.sched_yield()
        seen = there
        os.kill(child, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status, num_half
        unfinished = list(run.checkpoints.glob(".tmp-*"))
        num_half += bool(unfinished)
        found = plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None, expected_run_id="run-a")
        assert found.step == (40 if run.checkpoint(40).exists() else 20) and found.rejections == []
        assert not any(verify(folder).ok for folder in unfinished if not (folder / layout.MANIFEST).exists())
        os.kill(child, signal.SIGCONT)


def names(run: RunDir) -> set[str]:
    """What lies below the checkpoints; a folder may go away meanwhile."""
    return {os.path.join(root, name) for root, _, found in os.walk(run.checkpoints) for name in found}


def has_ended(child: int) -> bool:
    """Whether it has exited; its status stays to be asked for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
