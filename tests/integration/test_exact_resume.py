"""A run that is killed again and again is the run that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.run import read_json
from tests.conftest import OVERRIDES, TOTAL_STEPS
from tests.integration.compare import differences, num_tensors
from tests.integration.driver import Driver, wait_until_gone

pytestmark = pytest.mark.integration


def resumed_steps(driver: Driver) -> dict[int, int]:
    """attempt -> step that it resumed at."""
    return {e["attempt"]: e["step"] for e in driver.events() if e["event"] == "resumed"}


def replays(driver: Driver, attempt: int) -> dict[int, str]:
    """C152: step -> outcome of the saves of steps that stood already."""
    saves = [e for e in driver.events() if e["event"] == "checkpoint_saved"]
    before = {e["step"] for e in saves if e["attempt"] < attempt}
    return {e["step"]: e["outcome"] for e in saves if e["attempt"] == attempt and e["step"] in before}


def wait_for_attempt(driver: Driver, attempt: int) -> None:
    driver.wait_for(f"attempt {attempt} resumed", lambda _: attempt in resumed_steps(driver))


def test_killed_run_ends_with_the_same_bytes(workspace: Path, reference: Driver):
    """C10, C11, C13, C32, C35, C64, C106: rank, controller, writer in mid-save, the flow.

    Every fifth step is saved and every tenth is an epoch's end, so checkpoints lie at, before and after those.
    Multiples of 20 are preferred: the start after the flow's death goes back from 30 to 20.
    """
    hit = Driver(workspace / "hit", [*OVERRIDES, "resume.prefer_multiple=20", "recovery.in_place=false"])
    hit.start()
    hit.wait_for_verified(5)
    hit.wait_for_step(7)
    hit.kill("rank", 1)
    wait_for_attempt(hit, 2)
    hit.wait_for_verified(15)
    hit.wait_for_step(18, attempt=2)
    hit.kill("controller")
    wait_for_attempt(hit, 3)
    hit.wait_for_step(21, attempt=3)
    writer, step = hit.stop_writer_in_a_save()
    hit.kill_process(writer)
    hit.wait_for("the writer is back", lambda events: any(e["event"] == "recovered" for e in events))
    assert not writer.alive()
    assert [e["step"] for e in hit.events() if e["event"] == "worker_lost"] == [step], (
        "killed after the save, not in it"
    )
    hit.wait_for("step 20 is in the store", lambda _: hit.run.upload(20).exists())
    hit.wait_for_verified(30)
    hit.wait_for_step(33, attempt=3)
    assert resumed_steps(hit) == {2: 5, 3: 15}

    hit.kill_command()
    assert wait_until_gone(hit.own_processes()) == []
    assert read_json(hit.run.attempt(3))["outcome"]["class"] == "orphaned"
    hit.start()
    wait_for_attempt(hit, 4)
    assert resumed_steps(hit)[4] == 20
    hit.wait_for_step(36, attempt=4)
    assert replays(hit, attempt=4) == {25: "replayed_equal", 30: "replayed_equal"}

    assert hit.wait(240) == 0, hit.tail()
    final, expected = hit.run.checkpoint(TOTAL_STEPS), reference.run.checkpoint(TOTAL_STEPS)
    assert num_tensors(expected) > 100
    assert differences(final, expected) == []
    assert hit.rewards() == reference.rewards()
    assert sorted(hit.rewards()) == list(range(1, TOTAL_STEPS + 1))
    assert wait_until_gone(hit.own_processes()) == []


def test_result_counts_what_was_lost(workspace: Path, reference: Driver):
    result = json.loads(reference.run.result.read_text())
    assert result["final_step"] == result["target_step"] == result["uploaded"] == TOTAL_STEPS
    assert (result["attempts"], result["steps_trained"], result["steps_lost"]) == (1, TOTAL_STEPS, 0)
    rewards = reference.rewards()
    assert result["reward_first10"] == pytest.approx(sum(rewards[step] for step in range(1, 11)) / 10)
    assert result["reward_last10"] > result["reward_first10"]


def test_complete_run_does_nothing(reference: Driver):
    before = {path: path.stat().st_mtime_ns for path in reference.run.root.rglob("*") if path.is_file()}
    assert reference.run_to_end(60) == 0
    assert f"is complete: step {TOTAL_STEPS} of {TOTAL_STEPS}" in reference.tail()
    assert {path: path.stat().st_mtime_ns for path in reference.run.root.rglob("*") if path.is_file()} == before


def test_nothing_is_left_of_a_finished_run(reference: Driver):
    assert {"flow", "controller", "rank", "engine", "writer", "verifier", "uploader", "ray"} <= {
        ref.role for ref in reference.all_processes()
    }
    assert wait_until_gone(reference.all_processes()) == []
