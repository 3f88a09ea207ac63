"""Which checkpoint a real retry resumes from: multiples first, then no loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.driver import Driver, Event

pytestmark = [pytest.mark.integration, pytest.mark.long]

SMALL_BATCH = [
    "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2",
]  # fmt: skip
QUICK = [
    *SMALL_BATCH, "trainer.test_freq=-1", "s3.embedded=false", "retry.max_retries=8", "retry.delays_s=[0.2]",
    # What is tried here is the choice of a new attempt.
    "recovery.in_place=false",
]  # fmt: skip


def resumed(driver: Driver) -> dict[int, Event]:
    return {event["attempt"]: event for event in driver.events() if event["event"] == "resumed"}


def wait_until_resumed(driver: Driver, attempt: int) -> Event:
    return driver.wait_for(f"attempt {attempt} resumed", lambda _: resumed(driver).get(attempt))


def test_milestone_beats_newer_step_and_does_not_loop(workspace: Path):
    """C82, C154: 100 before 120; the next retry, having reached no newer multiple, takes the newest verified step.

    Kills from outside do not stop the run.
    """
    overrides = ["trainer.total_training_steps=130", "trainer.save_freq=10", "checkpoint.keep_last=50", *QUICK]
    driver = Driver(workspace / "milestone", overrides)
    driver.start()
    driver.wait_for_verified(120, timeout_s=240)
    driver.wait_for_step(123)
    driver.kill("rank")
    first = wait_until_resumed(driver, 2)
    assert (first["step"], first["plan"]["newest"], first["plan"]["steps_given_up"]) == (100, 120, 20)
    driver.wait_for_step(103, attempt=2)
    driver.kill("engine")
    second = wait_until_resumed(driver, 3)
    assert (second["step"], second["plan"]["avoided_multiple"]) == (120, 100)
    driver.wait_for_step(121, attempt=3)
    driver.kill("controller")
    assert wait_until_resumed(driver, 4)["step"] == 120
    assert driver.wait(150) == 0
    outcomes = {
        e["step"]: e["outcome"] for e in driver.events() if e["event"] == "checkpoint_saved" and e["attempt"] > 1
    }
    assert outcomes == {130: "published"}
