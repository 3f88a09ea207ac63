"""`trainer.debug`: exactly one step from the chosen checkpoint, with nothing written into the run.

The attempt works in a folder of its own beside the run, `.debug-<run>-…`, with a link to the chosen checkpoint;
it is removed at the end. It takes no lease of the run and may look at one that is being trained, as long as the ports
are free.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from keepstep.attempts import claim, end_leftovers
from keepstep.errors import CheckpointError
from keepstep.preflight.start import Start
from keepstep.run import RunDir

PREFIX = ".debug-"
NEVER_S = float("inf")
"""Silence after which another host's would count as gone: it is never looked at from here."""


@contextmanager
def scratch(start: Start) -> Iterator[Start]:
    """`start` in a folder of its own, which holds a link to the chosen checkpoint and nothing else.

    Raises:
        CheckpointError: the checkpoint would first have to be mended, which writes into the run.
    """
    if start.plan.repair:
        raise CheckpointError(
            f"The reference of step {start.plan.step} is damaged, and mending it writes into the run.",
            "Start the run once without trainer.debug: it mends it.",
        )
    sweep(start.run)
    folder = RunDir.at(tempfile.mkdtemp(prefix=f"{PREFIX}{start.run.root.name}-", dir=start.run.root.parent))
    folder.checkpoints.mkdir()
    step = start.plan.step
    if step is not None and start.plan.source == "local":
        folder.checkpoint(step).symlink_to(start.run.checkpoint(step))
    try:
        # The choice stands. What was passed over stays where it is: nothing is set aside.
        yield replace(start, run=folder, plan=replace(start.plan, rejections=[]))
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)


def sweep(run: RunDir) -> None:
    """Remove what killed ones of this run left: folders whose only attempt was of this host and is dead."""
    for path in run.root.parent.glob(f"{PREFIX}{run.root.name}-*"):
        left = RunDir.at(path)
        if left.attempt_numbers() and claim(left, left.attempt_numbers()[-1], NEVER_S).kind == "dead":
            end_leftovers(left, before=left.attempt_numbers()[-1] + 1)
            shutil.rmtree(path, ignore_errors=True)
