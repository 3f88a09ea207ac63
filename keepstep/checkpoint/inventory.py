"""A run's checkpoints on disk as retention sees them, and the act of retiring those that no rule keeps. Light half."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.cadence import upload_due
from keepstep.checkpoint.history import verified_steps
from keepstep.checkpoint.manifest import Manifest, ManifestError, parse
from keepstep.checkpoint.publish import Fence, point, remove
from keepstep.checkpoint.retention import Decision, Entry, Rules, decide
from keepstep.config.schema import EMBEDDED_BUCKET, CheckpointConfig, RunConfig
from keepstep.run import RunDir, read_json


def rules_of(checkpoint: CheckpointConfig) -> Rules:
    return Rules(
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
        keep_best=checkpoint.keep_best,
        higher_is_better=checkpoint.best_mode == "max",
        max_disk_bytes=checkpoint.max_disk_bytes,
    )


def entries(run: RunDir, steps: Iterable[int], run_id: str, best_metric: str) -> list[Entry]:
    """Those of `steps` that stand on disk and were written by this run; a folder without a readable manifest is not."""
    found = []
    for step in sorted(set(steps).intersection(run.steps())):
        manifest = _manifest(run.checkpoint(step))
        if manifest is not None and manifest.run_id == run_id and manifest.step == step:
            found.append(Entry(step, metric_of(manifest.metrics, best_metric), freed_bytes(run.checkpoint(step))))
    return found


def layout_of(run: RunDir, step: int) -> str | None:
    """The layout that a step on disk was written in; None without a readable manifest."""
    manifest = _manifest(run.checkpoint(step))
    return manifest.layout if manifest else None


def metric_of(metrics: dict[str, Any], name: str) -> float | None:
    """A metric that was taken at the checkpoint's own step; None when there is none."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def freed_bytes(folder: Path) -> int:
    """What deleting a checkpoint frees: files that other checkpoints link to stay."""
    sizes = (path.lstat() for path in folder.rglob("*"))
    return sum(info.st_size for info in sizes if info.st_nlink == 1)


def retire(run: RunDir, decision: Decision, check_fence: Fence, tell: Callable[[int, str], object]) -> None:
    """Point `best` to the best that stays, delete what the decision gives up, and tell each with its reason."""
    # First the pointer: it must not name a step that is gone.
    if decision.best is not None:
        point(run.best_link, run, decision.best, check_fence)
    elif _names_none_that_stays(run.best_link, [run.checkpoint(step).name for step in decision.deleted]):
        check_fence()
        run.best_link.unlink()
        run.text_of(run.best_link).unlink(missing_ok=True)
    for step, reason in decision.deleted.items():
        remove(run, step, check_fence)
        tell(step, reason)


def _names_none_that_stays(link: Path, deleted: list[str]) -> bool:
    """Whether it points to one of the folders that go, or to one that was set aside."""
    return link.is_symlink() and (os.readlink(link) in deleted or not link.exists())


def decide_for(
    run: RunDir,
    checkpoint: CheckpointConfig,
    *,
    run_id: str,
    verified: Iterable[int],
    waiting: frozenset[int],
    in_use: frozenset[int],
) -> Decision:
    """The decision over the verified steps on disk. It reads the disk, never what a process remembers."""
    found = entries(run, verified, run_id, checkpoint.best_metric)
    return decide(found, rules_of(checkpoint), waiting=waiting, in_use=in_use, pinned=run.pinned_steps())


def goes_to_store(config: RunConfig, step: int, last_step: int) -> bool:
    """`cadence.upload_due` under a run's configuration; never without a store."""
    return config.s3_enabled and upload_due(
        step, save_freq=config.trainer.save_freq, upload_interval=config.s3.upload_interval, last_step=last_step
    )


def is_confirmed(config: RunConfig, run: RunDir, step: int) -> bool:
    """Whether the store that is configured now has confirmed this step."""
    if not run.upload(step).is_file():
        return False
    record = read_json(run.upload(step))
    here = (config.s3.bucket or EMBEDDED_BUCKET, config.s3.prefix or run.default_s3_prefix)
    return (record["bucket"], record["prefix"]) == here


def waiting_steps(config: RunConfig, run: RunDir, last_step: int) -> list[int]:
    """Verified steps on disk that belong into the store and are not confirmed to be there, oldest first."""
    verified = verified_steps(run)
    return [
        step
        for step in run.steps()
        if step in verified and goes_to_store(config, step, last_step) and not is_confirmed(config, run, step)
    ]


def _manifest(folder: Path) -> Manifest | None:
    try:
        return parse((folder / layout.MANIFEST).read_bytes())
    except (OSError, ManifestError):
        return None
