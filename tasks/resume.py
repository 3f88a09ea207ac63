"""Which checkpoint the next attempt goes on from, and why. The trainer plans anew at every attempt; this shows it."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from keepstep.checkpoint.plan import plan
from keepstep.config.schema import RunConfig
from keepstep.preflight.start import find_record, open_store
from keepstep.run import RunDir


@task(cache_policy=NO_CACHE)
def plan_resume(config: RunConfig) -> int | None:
    """The step to go on from, None for the beginning. Raises `CheckpointError` when steps exist and none is usable."""
    run = RunDir.at(config.trainer.output_dir)
    existing, remote, _ = find_record(config, run, open_store(config, run))
    chosen = plan(
        run,
        policy=config.resume.policy,
        prefer_multiple=config.resume.prefer_multiple,
        max_rewind_steps=config.resume.max_rewind_steps,
        remote=remote,
        expected_run_id=existing["run_id"] if existing else None,
    )
    sentences = list(chosen.describe())
    for sentence in sentences:
        get_run_logger().info(sentence)
    create_markdown_artifact("\n".join(f"- {sentence}" for sentence in sentences), key="resume-plan")
    if remote:
        remote.close()
    return chosen.step
