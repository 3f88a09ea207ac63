"""Moves on disk: publish, quarantine, point, remove. Each asks the fence right before it acts.

`check_fence` raises when a newer attempt owns the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from keepstep.errors import CheckpointError
from keepstep.run import RunDir, fsync_dir, write_atomic

Fence = Callable[[], None]
TEMPORARY_PREFIX = ".tmp-"
REMOVING_PREFIX = ".removing-"


def publish(temporary: Path, run: RunDir, step: int, check_fence: Fence) -> Path:
    """Rename a whole, durable folder to `checkpoints/step_<N>`; durable on return.

    Raises:
        CheckpointError: the step stands already.
    """
    target = run.checkpoint(step)
    check_fence()
    if target.exists():
        # rename() would silently replace an empty folder.
        raise CheckpointError(f"{target} stands already.", "Move it aside: it is not overwritten.")
    os.rename(temporary, target)
    fsync_dir(run.checkpoints)
    return target


def quarantine(run: RunDir, folder: Path, step: int, reason: str, check_fence: Fence) -> Path:
    """Set a folder aside as `quarantine/step_<N>.<reason>.<k>`; never overwrites an earlier one."""
    run.quarantine.mkdir(parents=True, exist_ok=True)
    check_fence()
    number = 1
    while (target := run.quarantine / f"step_{step}.{reason}.{number}").exists():
        number += 1
    os.rename(folder, target)
    fsync_dir(run.quarantine)
    fsync_dir(folder.parent)
    return target


def point(link: Path, run: RunDir, step: int, check_fence: Fence) -> None:
    """Move a pointer (`run.latest_link` or `run.best_link`) and the text beside it to a verified step."""
    target = run.checkpoint(step).name
    if link.is_symlink() and os.readlink(link) == target and run.text_of(link).is_file():
        return
    temporary = run.checkpoints / f"{TEMPORARY_PREFIX}{link.name}"
    check_fence()
    temporary.unlink(missing_ok=True)
    # Relative to the link's own folder, so that a moved run keeps a working link.
    temporary.symlink_to(target)
    check_fence()
    if link.is_dir() and not link.is_symlink():
        # A copy from a store without links stands in its place; a link cannot replace a folder.
        quarantine(run, link, step, f"{link.name}-copy", check_fence)
    os.replace(temporary, link)
    write_atomic(run.text_of(link), f"{target}\n".encode())


def remove(run: RunDir, step: int, check_fence: Fence) -> None:
    """Delete a step: it disappears at once under its name, its files as well as they go."""
    aside = run.checkpoints / f"{REMOVING_PREFIX}step_{step}"
    check_fence()
    try:
        os.rename(run.checkpoint(step), aside)
    except FileNotFoundError:
        return
    # Somebody may hold files open, on a network filesystem that keeps the folder: the next sweep gets the rest.
    shutil.rmtree(aside, ignore_errors=True)


def sweep_temporaries(run: RunDir, check_fence: Fence) -> list[Path]:
    """Delete what killed saves, downloads and removals left under `checkpoints/`. Returns what was there."""
    if not run.checkpoints.is_dir():
        return []
    leftovers = [
        Path(entry.path)
        for entry in os.scandir(run.checkpoints)
        if entry.name.startswith((TEMPORARY_PREFIX, REMOVING_PREFIX))
    ]
    for path in leftovers:
        check_fence()
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return leftovers
