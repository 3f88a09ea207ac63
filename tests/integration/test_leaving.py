"""Asked to leave, held by another, taken over: one attempt at a time, and a good checkpoint behind it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.checkpoint.verify import verify
from keepstep.run import read_json
from tests.integration.driver import Driver, clean_environment, wait_until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REWARD = '''
"""Exact match that takes as long as a file beside it says; the file `scoring` says that it has begun."""
import time
from pathlib import Path

HERE = Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info):
    pause_s = float((HERE / "pause_s").read_text())
    if pause_s:
        (HERE / "scoring").touch()
    time.sleep(pause_s)
    return float(solution_str.strip() == ground_truth)
'''


@pytest.fixture
def reward(workspace: Path) -> Path:
    folder = workspace / "reward"
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    (folder / "pause_s").write_text("0")
    return folder


def test_one_attempt_at_a_time_and_every_way_of_being_asked_to_leave(workspace: Path, reward: Path):
    """C140: the holder is named and nothing is written. C151, C155: a notice saves the finished step, exit 75, also in
    the middle of a step that would not end in time; a reward function that hangs ends the attempt with its message."""
    settings = [
        "trainer.total_training_steps=60", "trainer.save_freq=50", "trainer.test_freq=-1", "s3.embedded=false",
        f"custom_reward_function.path={reward / 'reward.py'}", "retry.term_grace_s=20", "timeouts.reward_s=120",
    ]  # fmt: skip
    driver = Driver(workspace / "leaving", settings)
    driver.start()
    driver.wait_for_step(3)
    second = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "train", f"trainer.output_dir={driver.output_dir}", *settings],
        capture_output=True, text=True, timeout=120, env=clean_environment(),
    )  # fmt: skip
    assert second.returncode == 5, second.stderr
    (owner,) = driver.processes("controller")
    assert f"process {owner.pid}" in second.stderr and "Traceback" not in second.stderr
    assert driver.run.attempt_numbers() == [1]

    step = leave(driver, signal.SIGTERM)
    assert verify(driver.run.checkpoint(step)).resumable

    driver.command = "train"
    driver.start()
    driver.wait_for_step(step + 2)
    assert [event["step"] for event in driver.events() if event["event"] == "resumed"] == [step]
    (reward / "pause_s").write_text("5")
    driver.wait_for("scoring that takes minutes", lambda _: (reward / "scoring").exists())
    step = leave(driver, signal.SIGINT)
    assert "what runs is dropped" in driver.run.train_log(2).read_text()

    (reward / "pause_s").write_text("600")
    driver.overrides = [*settings[:-1], "timeouts.reward_s=2"]
    assert driver.run_to_end() == 1
    assert f"Step {step + 1}: the reward function did not end within 2 s." in driver.tail()
    assert "It hangs on the response" in driver.tail() and "Traceback" not in driver.tail()
    outcome = read_json(driver.run.attempt(3))["outcome"]
    assert (outcome["class"], outcome["retry"]) == ("no_progress", True)
    steps = [event["step"] for event in driver.events() if event["event"] == "step"]
    assert steps == list(range(1, step + 1)), "no step comes twice, and none is lost"
    assert wait_until_gone(driver.own_processes()) == []
    assert [number for number in (1, 2, 3) if driver.run.temporary(number).exists()] == []


def leave(driver: Driver, number: signal.Signals) -> int:
    """Signal the command; it ends as preempted with its last finished step saved and no process. The step."""
    assert driver.process is not None
    driver.process.send_signal(number)
    assert driver.wait(60) == 75, driver.tail()
    step = driver.run.steps()[-1]
    finished = [event["step"] for event in driver.events() if event["event"] == "step"]
    verified = [event["step"] for event in driver.events() if event["event"] == "checkpoint_verified"]
    assert step == finished[-1] == verified[-1] < 60
    assert read_json(driver.run.attempt(driver.run.attempt_numbers()[-1]))["outcome"]["status"] == "preempted"
    assert wait_until_gone(driver.own_processes()) == []
    return step
