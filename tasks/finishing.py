"""The end of a run: what it must have reached to count as a success."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from keepstep.config.schema import RunConfig
from keepstep.errors import CheckpointError, StorageError

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
