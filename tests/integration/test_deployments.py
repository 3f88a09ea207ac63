"""What `keepstep up` registers, for real: a schedule fires, a worker picks it up, an audit finds what is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.form import TrainingForm
from keepstep.audit import audit
from keepstep.checkpoint import layout
from keepstep.config.load import load, to_yaml
from keepstep.events.log import EventLog
from keepstep.platform import servers
from keepstep.preflight import contract
from keepstep.processes import ProcessRef
from keepstep.run import RunDir, write_json
from keepstep.storage.remote import open_remote, step_key, upload_checkpoint
from tests.integration.driver import REPOSITORY, clean_environment
from tests.integration.test_unattended import Platform
from tests.unit import builder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PATIENCE_S = 600.0
"""For each wait, on a machine that is busy with other things as well."""
INTERVAL_S = 10
Record = dict[str, Any]


@pytest.fixture(scope="module")
def platform(workspace: Path) -> Iterator[Platform]:
    platform = Platform(workspace / "deployments")
    platform.keepstep("up")
    try:
        yield platform
    finally:
        platform.keepstep("down")


def settings(run: RunDir, **changes: Any) -> Record:
    """Overrides of the quickstart for a run of 40 steps that keeps its newest checkpoint."""
    return {
        "trainer.output_dir": str(run.root),
        "trainer.total_training_steps": 40,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 0,
        "s3.embedded": False,
        **changes,
    }


def standing_run(folder: Path, **changes: Any) -> RunDir:
    """A run that is complete at step 40, with real checkpoints of steps 20 and 40."""
    run = RunDir.at(folder)
    for step in (20, 40):
        builder.write(run, step)
    overrides = settings(run, **changes)
    config = load("quickstart", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    terms = contract.terms(config, model_fingerprint="x", total_steps=40)
    write_json(run.record, {"run_id": "run-a", "contract": terms, "dataset": {"num_rows": 640}})
    run.config.write_text(to_yaml(config))
    write_json(run.result, {
        "final_step": 40, "target_step": 40, "final_checkpoint": "", "attempts": 1, "steps_trained": 40,
        "steps_lost": 0, "uploaded": None, "reward_first10": 0.1, "reward_last10": 0.9, "wall_s": 1.0,
    })  # fmt: skip
    events = EventLog(run.events, 1)
    for step in (20, 40):
        events.emit("checkpoint_verified", step=step)
    events.close()
    return run


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def deployments(platform: Platform) -> dict[str, Record]:
    return {one["name"]: one for one in platform.api.ask("POST", "deployments/filter", {})}


def flow_runs_of(platform: Platform, deployment: Record) -> list[Record]:
    found: list[Record] = platform.api.ask(
        "POST", "flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}}
    )
    return found


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.5)
    return found


def test_everything_in_the_file_is_registered(platform: Platform):
    wanted = {
        one["name"]: one
        for one in yaml.safe_load((REPOSITORY / "deployments" / "prefect.yaml").read_text())["deployments"]
    }
    found = deployments(platform)
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name]["work_pool_name"] == one["work_pool"]["name"]
        assert found[name]["job_variables"] == one["work_pool"]["job_variables"]
        assert (found[name]["entrypoint"], found[name]["parameters"]) == (one["entrypoint"], one["parameters"])
        assert [(s["slug"], s["active"], s["schedule"]["timezone"]) for s in found[name]["schedules"]] == [
            (s["slug"], s["active"], s["timezone"]) for s in one.get("schedules", [])
        ]
        schema = found[name]["parameter_openapi_schema"]
        assert set(one["parameters"]) <= set(schema["properties"])
        if one["entrypoint"] == "flows.grpo_train.grpo_train":
            assert set(schema["definitions"]["TrainingForm"]["properties"]) == set(TrainingForm.model_fields)


def test_schedules_stay_as_a_person_switched_them(platform: Platform):
    """One by the document's command, one as the page does it; `up` registers both again and undoes neither."""

    def schedule_of(name: str) -> Record:
        (schedule,) = deployments(platform)[name]["schedules"]
        return schedule | {"path": f"deployments/{schedule['deployment_id']}/schedules/{schedule['id']}"}

    nightly, daily = schedule_of("single-gpu"), schedule_of("checkpoint-audit")
    assert (nightly["active"], daily["active"]) == (False, True)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "deployment", "schedule", "resume", "grpo-train/single-gpu", nightly["id"]],
        env={**clean_environment(), "PREFECT_API_URL": platform.api.url, "DO_NOT_TRACK": "1"},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    platform.api.ask("PATCH", daily["path"], {"active": False})
    try:
        platform.keepstep("up")
        assert (schedule_of("single-gpu")["active"], schedule_of("checkpoint-audit")["active"]) == (True, False)
    finally:
        platform.api.ask("PATCH", schedule_of("single-gpu")["path"], {"active": False})


def test_a_schedule_fires_and_the_worker_takes_it_up(platform: Platform):
    """On a run that is complete, which the flow says and trains nothing. What waits to be switched on does not fire."""
    run = standing_run(platform.folder / "scheduled")
    quickstart = deployments(platform)["quickstart"]
    (schedule,) = platform.api.ask(
        "POST",
        f"deployments/{quickstart['id']}/schedules",
        [
            {
                "schedule": {"interval": INTERVAL_S, "timezone": "Europe/Berlin"},
                "active": True,
                "parameters": {
                    "config": "quickstart",
                    "overrides": {key: value for key, value in settings(run).items() if key != "trainer.output_dir"},
                    "form": {"output_dir": str(run.root)},
                },
            }
        ],
    )

    def taken_up() -> list[Record]:
        return [one for one in flow_runs_of(platform, quickstart) if one["state"]["type"] != "SCHEDULED"]

    found = wait_for("a scheduled flow run that the worker took", taken_up)
    # What is scheduled and not taken yet goes with it.
    platform.api.ask("DELETE", f"deployments/{quickstart['id']}/schedules/{schedule['id']}")
    flow_run = platform.wait_for(found[0]["id"], "an end", lambda one: one["state"]["type"] in ("COMPLETED", "FAILED"))
    assert flow_run["state"]["name"] == "Completed", flow_run["state"]["message"]
    assert flow_run["auto_scheduled"] and flow_run["work_pool_name"] == "keepstep-local"
    assert run.attempt_numbers() == []
    assert flow_runs_of(platform, deployments(platform)["single-gpu"]) == []


def test_an_audit_fails_by_name_and_reports_what_is_damaged(platform: Platform):
    good, bad = (standing_run(platform.folder / "audited" / name) for name in ("good", "bad"))
    damage(bad.checkpoint(20) / layout.ACTOR)
    deployment = deployments(platform)["checkpoint-audit"]
    body = {"parameters": {"runs": [str(platform.folder / "nothing"), str(platform.folder / "audited" / "*")]}}
    flow_run = platform.api.ask("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"]
    ended = platform.wait_for(flow_run, "an end", lambda found: found["state"]["type"] in ("FAILED", "COMPLETED"))
    assert ended["state"]["name"] == "DamagedCheckpoints"
    assert f"{bad.root}: step 20 on the disk: {layout.ACTOR}" in ended["state"]["message"]
    (artifact,) = platform.api.ask(
        "POST",
        "artifacts/filter",
        {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "key": {"any_": ["checkpoint-audit"]}}},
    )
    assert (
        f"| {good.root} | 40 | disk |" in artifact["data"] and f"- {bad.root}, step 20 on the disk" in artifact["data"]
    )
    assert f"- {platform.folder / 'nothing'} is no run" in artifact["data"]
    # Retention of what is good; the damaged one stays to be looked at.
    assert (good.steps(), bad.steps()) == ([40], [20, 40])


def test_an_audit_looks_into_the_store_and_retires_there_what_no_rule_keeps(tmp_path: Path):
    """The embedded store does not run while nobody uses it: the audit starts it."""
    run = standing_run(
        tmp_path / "run", **{"s3.embedded": True, "s3.upload_interval": 20, "s3.keep_remote": "retention"}
    )
    config = load(str(run.config)).s3
    holder = ProcessRef.current("flow")

    def in_store(act: Callable[[Any], Any]) -> Any:
        info = servers.object_store(run.platform, holder)
        try:
            with closing(open_remote(config, run, info.env)) as remote:
                return act(remote)
        finally:
            servers.release(run.platform, holder)

    def upload(remote: Any) -> None:
        for step in (20, 40):
            upload_checkpoint(remote, run, step, None)
            write_json(run.upload(step), {"step": step, "bucket": remote.bucket, "prefix": remote.prefix})

    in_store(upload)
    found = audit(run)
    assert [(look.step, look.place) for look in found.looks] == [
        (20, "disk"), (40, "disk"), (20, "store"), (40, "store"),
    ]  # fmt: skip
    assert found.bad == []
    assert [(entry["step"], entry["place"]) for entry in found.retired] == [(20, "disk"), (20, "store")]
    assert in_store(lambda remote: remote.steps()) == [40]

    in_store(lambda remote: remote.store.delete(step_key(40, layout.OPTIMIZER)))
    write_json(run.upload(20), {"step": 20, "bucket": servers.BUCKET, "prefix": run.default_s3_prefix})
    bad = audit(run).bad
    assert [(look.step, look.place) for look in bad] == [(20, "store"), (40, "store")]
    assert "had confirmed it" in bad[0].problems[0]
    assert bad[1].problems == [f"{layout.OPTIMIZER}: not in the store"]
