"""Rows and digests of the data set against the record of the run's first start."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from keepstep.config.schema import RunConfig
from keepstep.preflight import start
from keepstep.run import RunDir, read_json


@task(cache_policy=NO_CACHE)
def check_dataset(config: RunConfig) -> dict[str, Any]:
    """The data set's record, as counted now. Raises `DataError` where it is not the recorded one."""
    run = RunDir.at(config.trainer.output_dir)
    existing = read_json(run.record) if run.has_record() else None
    _, _, found = start.check_dataset(config, run, existing)
    get_run_logger().info("%d rows in %d files", found["num_rows"], len(found["files"]))
    return found
