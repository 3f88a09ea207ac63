"""How an attempt begins: what it says, the probe, one step aside, a warm start, a lost scheduler. Real runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.config.load import load
from keepstep.controller.debugging import sweep
from keepstep.events.log import read_jsonl
from keepstep.processes import boot_id, hostname
from keepstep.run import RunDir, read_json, write_json
from tests.conftest import OVERRIDES
from tests.integration.compare import differences
from tests.integration.driver import Driver, clean_environment
from tests.integration.test_refusals import snapshot
from tests.unit.forging import reseal

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def train(output: Path, *overrides: str, command: str = "train") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", command, f"trainer.output_dir={output}", "s3.embedded=false",
         *overrides],
        capture_output=True, text=True, timeout=240, env=clean_environment(),
    )  # fmt: skip


@pytest.fixture
def standing(reference: Driver, workspace: Path) -> RunDir:
    """A copy of the reference run that ends at step 20 and may be spoiled."""
    run = RunDir.at(workspace / "standing")
    shutil.rmtree(run.root, ignore_errors=True)
    shutil.copytree(reference.run.root, run.root, symlinks=True)
    run.result.unlink()
    for step in run.steps():
        if step > 20:
            shutil.rmtree(run.checkpoint(step))
    return run


def test_debug_takes_one_step_and_writes_nothing(standing: RunDir):
    """Whatever the run's length says; three lines before all others; the run is the same to the byte."""
    before = snapshot(standing.root)
    done = train(standing.root, *OVERRIDES, "--debug", command="run")
    assert done.returncode == 0, done.stderr
    assert snapshot(standing.root) == before
    lines = [line for line in done.stderr.splitlines() if line.startswith(("[DEBUG]", "resumed at", "step ", "probe"))]
    assert lines[:3] == [
        "[DEBUG] Resuming from step 20, epoch 3",
        # Two updates a step.
        "[DEBUG] Loaded actor optimizer with step 40",
        "[DEBUG] Dataloader offset set to 1280",
    ]
    assert lines[3].startswith(f"resumed at step 20 of 44 from {standing.checkpoint(20)} (verified, newest")
    assert lines[4] == "probe: the same prompts have the log-probs of the save (largest difference 0)"
    assert [line.split()[1] for line in lines[5:]] == ["21/44"]
    assert not list(standing.root.parent.glob(".debug-*"))


def test_what_a_killed_debug_left_is_removed_and_nothing_else(tmp_path: Path):
    run, notes = RunDir.at(tmp_path / "run"), tmp_path / ".debug-run-notes"
    notes.mkdir()
    left = RunDir.at(tmp_path / ".debug-run-abc")
    owner = {"host": hostname(), "pid": 2**22 + 7, "start_time": 1, "boot_id": boot_id()}
    record = {"attempt": 1, "owner": owner, "heartbeat": 0.0, "outcome": None, "processes": []}
    write_json(left.attempt(1), record)
    elsewhere = RunDir.at(tmp_path / ".debug-run-def")
    write_json(elsewhere.attempt(1), record | {"owner": owner | {"host": "elsewhere"}})
    sweep(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".debug-run-def", ".debug-run-notes"]


def test_a_policy_that_is_not_the_saved_one_stops_the_attempt(standing: RunDir):
    """C32, C95: the bytes verify, the log-probs are others: nothing is trained on."""
    path = standing.checkpoint(20) / "trainer_state.json"
    state = read_json(path)
    state["probe"]["log_probs"][0][0] -= 0.01
    write_json(path, state)
    reseal(standing.checkpoint(20))
    done = train(standing.root, *OVERRIDES)
    assert done.returncode == 1, done.stderr
    assert "differ by up to 0.01 nats a token, tolerance 0.001 (fp32)" in done.stderr
    assert "Traceback" not in done.stderr
    assert standing.steps()[-1] == 20
    assert [e["step"] for e in read_jsonl(standing.events) if e["event"] == "step"][-1] == 44, "none was trained"


def test_a_warm_start_begins_at_step_0(reference: Driver, workspace: Path):
    """C124: weights of step 44, and nothing else of it."""
    source = reference.run.checkpoint(44)
    run = RunDir.at(workspace / "warm")
    done = train(run.root, f"trainer.init_from={source}", "trainer.total_training_steps=2", "trainer.test_freq=-1")
    assert done.returncode == 0, done.stderr
    events = list(read_jsonl(run.events))
    (initialised,) = (event for event in events if event["event"] == "initialised")
    assert (initialised["source"], initialised["left_out"]) == (str(source), [])
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2]
    # The reference is the policy itself, so divergence begins anew; the rate warms up from its beginning.
    (last,) = (event for event in reference.events() if event["event"] == "step" and event["step"] == 44)
    assert steps[0]["kl"] < last["kl"] / 4 and steps[0]["lr"] == pytest.approx(5e-4 / 6)
    state = read_json(run.checkpoint(2) / "trainer_state.json")
    assert (state["global_step"], state["num_updates"], state["epoch"]) == (2, 4, 1)
    assert read_json(run.record)["contract"]["init_from.fingerprint"]


def test_a_lost_scheduler_is_rebuilt_and_written_down(standing: RunDir, reference: Driver):
    """C115: with the waiver the run goes on as if it had not been lost; without it, it does not."""
    (standing.checkpoint(20) / "actor" / "scheduler.pt").unlink()
    for step in standing.steps()[:-1]:
        shutil.rmtree(standing.checkpoint(step))
    done = train(standing.root, *OVERRIDES)
    assert done.returncode == 1 and "resume.allow=[scheduler] rebuilds it" in done.stderr
    done = train(
        standing.root, *OVERRIDES, "resume.allow=[scheduler]", "checkpoint.keep_last=3", "trainer.save_freq=22"
    )
    assert done.returncode == 0, done.stderr
    assert "its scheduler is rebuilt at the global step" in done.stderr
    assert "learning rate: 0.0005 in step 20, 0.0005 in step 21" in done.stderr
    (waiver,) = read_json(standing.record)["waivers"]
    assert waiver["fields"] == ["scheduler"]
    # What prunes and audits later goes by the newest settings, and what was allowed once is not allowed for ever.
    settings = load(str(standing.config))
    assert (settings.checkpoint.keep_last, settings.trainer.save_freq, settings.resume.allow) == (3, 22, [])
    attempt = waiver["attempt"]
    verified = [
        event["step"]
        for event in read_jsonl(standing.events)
        if event["event"] == "checkpoint_verified" and event["attempt"] == attempt
    ]
    # The one without its scheduler never counts as good.
    assert verified == [22, 44]
    assert differences(standing.checkpoint(44), reference.run.checkpoint(44)) == []
