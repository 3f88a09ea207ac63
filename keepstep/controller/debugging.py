"""`trainer.debug`: exactly one step from the chosen checkpoint, with nothing written into the run.

The attempt works in a folder of its own beside the run, `.debug-<run>-<pid>`, with a link to the chosen checkpoint;
it is removed at the end. It takes no lease of the run and may look at one that is being trained, as long as the ports
are free.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from keepstep.errors import CheckpointError
from keepstep.preflight.start import Start
from keepstep.processes import ProcessRef, start_time
from keepstep.run import RunDir

PREFIX = ".debug-"


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
    sweep(start.run.root.parent)
    folder = RunDir.at(start.run.root.parent / f"{PREFIX}{start.run.root.name}-{ProcessRef.current('controller').pid}")
    folder.checkpoints.mkdir(parents=True)
    step = start.plan.step
    if step is not None and start.plan.source == "local":
        folder.checkpoint(step).symlink_to(start.run.checkpoint(step))
    try:
        # The choice stands. What was passed over stays where it is: nothing is set aside.
        yield replace(start, run=folder, plan=replace(start.plan, rejections=[]))
    finally:
        shutil.rmtree(folder.root, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove what a killed one left."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdigit() and start_time(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)
