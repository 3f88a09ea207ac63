"""The end of a run: what it must have reached to count as a success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from keepstep.config.schema import RunConfig
from keepstep.errors import CheckpointError, NoProgressError, StorageError
from keepstep.run import RunDir

Result = dict[str, Any]


@task(cache_policy=NO_CACHE)
def finish(config: RunConfig, result: Result) -> Result:
    """Hold result.json against the goal.

    Raises:
        CheckpointError: the run did not reach its last step.
        StorageError: the store has not confirmed the last step.
    """
    check_result(config, result)
    return result


def check_result(config: RunConfig, result: Result) -> None:
    where = config.trainer.output_dir
    if result["final_step"] != result["target_step"]:
        raise CheckpointError(f"{where} ended at step {result['final_step']}, its goal is {result['target_step']}.")
    if config.s3_enabled and result["uploaded"] != result["final_step"]:
        raise StorageError(
            f"{where}: the store has confirmed step {result['uploaded']}, the last step is {result['final_step']}.",
            "Start the same command again: it uploads what is missing and trains nothing.",
        )


@task(cache_policy=NO_CACHE)
def export_last_step(config: RunConfig, result: Result) -> str:
    """Export the last checkpoint into the run's folder, unless it is there; returns the folder.

    Raises:
        CheckpointError: what `keepstep export` says against it.
        NoProgressError: it did not end within `export.timeout_s`.
    """
    run, step = RunDir.at(config.trainer.output_dir), result["final_step"]
    target = run.export / f"step_{step}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        _export(run.checkpoint(step), target, config)
    return str(target)


def _export(checkpoint: Path, target: Path, config: RunConfig) -> None:
    # In a process of its own: the flow's never imports torch.
    command = [sys.executable, "-m", "keepstep.cli.main", "export", str(checkpoint), str(target)]
    timeout_s = config.export.timeout_s
    try:
        done = subprocess.run(
            [*command, "--dtype", config.export.dtype], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NoProgressError(
            f"The export of {checkpoint} did not end within {timeout_s:.0f} s.", "Raise export.timeout_s."
        ) from error
    if done.returncode != 0:
        last = done.stderr.strip()[-500:] or f"exit status {done.returncode}"
        raise CheckpointError(f"The run is done, but its export failed: {last}", f"Try again: {' '.join(command[2:])}")
