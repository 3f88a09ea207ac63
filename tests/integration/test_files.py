"""The files of a run that others read: their fields are pinned."""

from __future__ import annotations

import json
import re
from datetime import datetime

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.manifest import parse
from keepstep.config.load import load, to_dotted
from keepstep.run import read_json
from tests.conftest import TOTAL_STEPS
from tests.integration.driver import Driver

pytestmark = pytest.mark.integration

EVENTS = {
    "attempt_started", "resumed", "step", "validated", "checkpoint_saved", "checkpoint_verified", "checkpoint_rejected",
    "checkpoint_uploaded", "checkpoint_downloaded", "checkpoint_pruned", "upload_progress", "upload_failed",
    "preempted", "worker_lost", "recovered", "failed", "fenced", "finished",
}  # fmt: skip
ROLES = {
    "flow", "controller", "rank", "engine", "writer", "verifier", "uploader", "ray", "object-store", "prefect-server",
    "reaper",
}  # fmt: skip


def test_events(reference: Driver):
    events = [json.loads(line) for line in reference.run.events.read_text().splitlines()]
    assert {event["event"] for event in events} <= EVENTS
    for event in events:
        assert list(event)[:3] == ["time", "attempt", "event"]
        assert datetime.fromisoformat(event["time"]).tzinfo is not None
        assert event["attempt"] == 1
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, TOTAL_STEPS + 1))
    assert all({"reward", "kl", "lr", "seconds"} <= event.keys() for event in steps)
    (before,) = [event for event in events if event["event"] == "validated"]
    assert before["step"] == 0 and 0 < before["val_reward"] < 1
    saves = [event["step"] for event in events if event["event"] == "checkpoint_saved"]
    assert saves == [*range(5, TOTAL_STEPS, 5), TOTAL_STEPS]
    assert [event["step"] for event in events if event["event"] == "checkpoint_verified"] == saves
    assert [event["step"] for event in events if event["event"] == "checkpoint_uploaded"] == [20, 40, TOTAL_STEPS]


def test_metrics(reference: Driver):
    """A line for every step; of the policy that the run began with, step 0, there is its validation."""
    first, *steps = [json.loads(line) for line in reference.run.metrics.read_text().splitlines()]
    assert first["step"] == 0 and {name.partition("/")[0] for name in first} == {"time", "attempt", "step", "val"}
    assert [line["step"] for line in steps] == list(range(1, TOTAL_STEPS + 1))
    assert [line["step"] for line in steps if "val/reward/mean" in line] == [20, 40]


def test_attempt(reference: Driver):
    record = read_json(reference.run.attempt(1))
    assert list(record) == ["attempt", "owner", "heartbeat", "outcome", "processes"]
    assert set(record["owner"]) == {"host", "pid", "start_time", "boot_id"}
    assert record["outcome"] == {"status": "finished", "step": TOTAL_STEPS}
    assert {process["role"] for process in record["processes"]} <= ROLES
    assert all(set(process) == {"role", "rank", "pid", "start_time", "host"} for process in record["processes"])
    assert sorted(process["rank"] for process in record["processes"] if process["role"] == "rank") == [0, 1]


def test_result(reference: Driver):
    assert list(read_json(reference.run.result)) == [
        "final_step", "target_step", "final_checkpoint", "attempts", "steps_trained", "steps_lost", "uploaded",
        "reward_first10", "reward_last10", "wall_s",
    ]  # fmt: skip


def test_manifest_and_state(reference: Driver):
    folder = reference.run.checkpoint(40)
    value = json.loads((folder / layout.MANIFEST).read_bytes())
    assert set(value) == {
        "layout", "version", "run_id", "attempt", "step", "world_size", "required", "files", "metrics", "self",
    }  # fmt: skip
    assert value["required"] == [
        "actor/pytorch_model.bin", "actor/optimizer.pt", "actor/scheduler.pt", "ref/pytorch_model.bin",
        "trainer_state.json",
    ]  # fmt: skip
    assert set(value["files"]["trainer_state.json"]) == {"size", "part_size", "parts", "tree"}
    assert parse((folder / layout.MANIFEST).read_bytes()).run_id == read_json(reference.run.record)["run_id"]
    state = read_json(folder / layout.TRAINER_STATE)
    # 40 steps of 64 prompts are four epochs of 640 rows: the next row is the first of the fifth.
    assert (state["global_step"], state["epoch"]) == (40, 5)
    # 100 rows before the first step, at step 20 and at step 40.
    assert state["dataloader_state"] == {"train_dataset_offset": 2560, "val_dataset_offset": 300}
    assert len(state["rng_states"]["per_rank"]) == 2


def test_saving_and_validating_on_the_same_step(reference: Driver):
    """C25, C26, C38: it works, the checkpoint carries the metric, others carry none; the last step is always saved."""
    metrics = {step: parse((reference.run.checkpoint(step) / layout.MANIFEST).read_bytes()).metrics
               for step in reference.run.steps()}  # fmt: skip
    assert sorted(metrics) == [*range(5, 41, 5), TOTAL_STEPS]
    validated = {step: found["val/reward/mean"] for step, found in metrics.items() if "val/reward/mean" in found}
    assert sorted(validated) == [20, 40]
    best = max(validated, key=lambda step: (validated[step], step))
    assert reference.run.best_link.readlink().name == f"step_{best}"


def test_train_log(reference: Driver):
    """The count of rows, every setting, the seed, the learning rate of each step."""
    log = reference.run.train_log(1).read_text()
    assert re.search(r" Loaded train dataset: 640 rows$", log, re.M)
    assert re.search(r" seed=42 ", log)
    for line in to_dotted(load(str(reference.run.config))):
        assert f" {line}\n" in log, line
    assert len(re.findall(r" step \d+/44 .*\blr=[0-9.e-]+", log)) == TOTAL_STEPS
    assert read_json(reference.run.record)["dataset"]["num_rows"] == 640


def test_pointers(reference: Driver):
    assert reference.run.latest_link.readlink().name == f"step_{TOTAL_STEPS}"
    assert not reference.run.latest_link.readlink().is_absolute()
    assert reference.run.text_of(reference.run.latest_link).read_text() == f"step_{TOTAL_STEPS}\n"


def test_no_secret_is_written_anywhere(reference: Driver):
    """Credentials of the embedded store stand in their own file, readable by the owner alone, and nowhere else."""
    (credentials,) = reference.run.platform.rglob("credentials.json")
    assert credentials.stat().st_mode & 0o077 == 0
    secrets = [value for value in read_json(credentials).values() if len(str(value)) > 12]
    assert secrets
    for path in [reference.log, *(p for p in reference.run.root.rglob("*") if p.is_file() and not p.is_symlink())]:
        content = path.read_bytes()
        assert not any(str(secret).encode() in content for secret in secrets), path
