"""Everything that can be refused before a rank or an engine starts."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from keepstep.checkpoint.plan import ResumePlan
from keepstep.config.schema import RunConfig
from keepstep.preflight.start import prepare
from tasks.artifacts import publish


@task(cache_policy=NO_CACHE)
def preflight(config: RunConfig) -> tuple[int, ResumePlan]:
    """Room, folder, store, data set, model, contract and checkpoints; (total steps, where the run goes on)."""
    found = prepare(config)
    for warning in found.warnings:
        get_run_logger().warning(warning)
    store = found.remote.store.where if found.remote else "does not answer" if config.s3_enabled else "none"
    lines = [
        f"- run folder: `{found.run.root}`",
        f"- steps: {found.total_steps}",
        f"- rows: {found.dataset['num_rows']} in {len(found.train_files)} training files",
        f"- object store: {store}",
        *(f"- accepted change: `{drift.field}`" for drift in found.waived),
        *(f"- warning: {warning}" for warning in found.warnings),
    ]
    publish("\n".join(lines), key="preflight", description="What was checked before the start")
    if found.remote:
        found.remote.close()
    return found.total_steps, found.plan
