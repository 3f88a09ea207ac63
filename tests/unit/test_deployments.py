"""deployments/prefect.yaml and configs/: everything loads, and every flow takes the parameters of its deployments."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from flows import form
from flows.form import TrainingForm
from keepstep.audit import AUDIT_ENDS
from keepstep.cli.main import build_parser
from keepstep.config.load import load, validate
from keepstep.platform import local
from keepstep.rewards.load import load_reward

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FILE = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
DEPLOYMENTS = {deployment["name"]: deployment for deployment in FILE["deployments"]}
TRAINING = [name for name, one in DEPLOYMENTS.items() if one["entrypoint"] == "flows.grpo_train.grpo_train"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads_and_its_settings_go_together(path: Path):
    assert validate(load(str(path))) == []


def test_the_deployments_are_those_of_the_design():
    assert set(DEPLOYMENTS) == {
        "quickstart", "single-gpu", "qwen3-8b-gsm8k-8gpu", "qwen3-8b-gsm8k-kuberay-preemptible", "checkpoint-audit",
    }  # fmt: skip
    assert {one["work_pool"]["name"] for one in DEPLOYMENTS.values()} == {"keepstep-local", "keepstep-k8s"}
    assert all(one["tags"] and one["description"] for one in DEPLOYMENTS.values())


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_deployment_is_the_configuration_of_its_name(name: str):
    parameters = DEPLOYMENTS[name]["parameters"]
    assert parameters == {"config": name, "overrides": {}}
    validate(load(parameters["config"]))


def test_the_preemptible_one_has_the_sizes_that_were_asked_for():
    config = load("qwen3-8b-gsm8k-kuberay-preemptible")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, rollout.n) == (4, 8, 5)
    assert actor.fsdp_config.param_offload is False
    assert (config.trainer.save_freq, config.s3.upload_interval) == (20, 100)
    assert all(str(files).startswith("s3://") for files in (config.data.train_files, config.data.val_files))
    # What is `latest` or bounded is shown, commented, with what it costs.
    text = (ROOT / "configs" / "qwen3-8b-gsm8k-kuberay-preemptible.yaml").read_text()
    assert "# policy: latest" in text and "# max_rewind_steps: 40" in text


def test_sizes_of_the_cluster_are_those_of_the_values():
    """Nodes, GPUs, grace, pool and the head's address stand in two files."""
    values = yaml.safe_load((ROOT / "deployments" / "values.yaml").read_text())
    config = load("qwen3-8b-gsm8k-kuberay-preemptible")
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (
        values["gpu_nodes"]["num_nodes"], values["gpu_nodes"]["num_gpus"],
    )  # fmt: skip
    assert config.retry.term_grace_s == values["term_grace_s"]
    assert config.trainer.output_dir.startswith(values["storage"]["mount_path"] + "/")
    assert config.ray.address == f"http://{values['name']}-head-svc:8265"
    assert values["work_pool"] == DEPLOYMENTS["qwen3-8b-gsm8k-kuberay-preemptible"]["work_pool"]["name"]


def parameters_of(entrypoint: str) -> set[str]:
    """Names of the flow's parameters, from its source: importing Prefect takes seconds."""
    module, function = entrypoint.rsplit(".", 1)
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return {argument.arg for argument in found.args.args}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entrypoints_are_module_paths_of_flows_that_take_the_parameters(name: str):
    deployment = DEPLOYMENTS[name]
    assert re.fullmatch(r"flows\.\w+\.\w+", deployment["entrypoint"])
    assert set(deployment["parameters"]) <= parameters_of(deployment["entrypoint"])


def test_schedules_name_their_time_zone_and_training_waits_to_be_switched_on():
    schedules: dict[str, list[dict[str, Any]]] = {name: one.get("schedules", []) for name, one in DEPLOYMENTS.items()}
    for of_one in schedules.values():
        for schedule in of_one:
            ZoneInfo(schedule["timezone"])
            assert len(schedule["cron"].split()) == 5 and schedule["slug"]
    assert [one["active"] for name in TRAINING for one in schedules[name]] == [False]
    assert [one["active"] for one in schedules["checkpoint-audit"]] == [True]


def test_a_schedule_that_exists_keeps_its_switch():
    """Known by flow, deployment and slug; a deployment of the same name that is somebody else's says nothing."""
    entrypoint = DEPLOYMENTS["single-gpu"]["entrypoint"]

    def declared(found: list[dict[str, Any]]) -> dict[str, Any]:
        (schedule,) = next(
            one["schedules"] for one in local.as_switched(FILE, found)["deployments"] if one["name"] == "single-gpu"
        )
        assert {"slug", "cron", "timezone"} <= set(schedule)
        return schedule

    there = {"name": "single-gpu", "entrypoint": entrypoint, "schedules": [{"slug": "nightly", "active": True}]}
    assert declared([])["active"] is False
    assert "active" not in declared([there])
    assert declared([there | {"entrypoint": "others.flow"}])["active"] is False
    assert declared([there | {"schedules": [{"slug": None}]}])["active"] is False
    assert FILE["deployments"][1]["schedules"][0]["active"] is False, "what was declared is left alone"


def test_nobody_tries_a_flow_again_but_the_automation():
    """C127: exactly one layer retries a flow."""
    for path in (ROOT / "flows").glob("*.py"):
        assert not re.search(r"@flow\([^)]*retries", path.read_text()), path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configurations_reward_is_there(path: Path):
    reward = load(str(path)).custom_reward_function
    assert callable(load_reward(reward.name, reward.path))


def test_the_gsm8k_configurations_reward_the_marked_answer():
    function = load_reward(load("single-gpu").custom_reward_function.name)
    assert [function("openai/gsm8k", text, "72", {}) for text in ("so #### 72", "so #### 71")] == [1.0, 0.0]


# ---- documents -----------------------------------------------------------------------------------------------------


def commands(document: str, begin: str) -> list[list[str]]:
    """Commands of the document's fences that begin so, split as a shell would; what is in quotes may span lines."""
    text = (ROOT / "docs" / document).read_text()
    fences = re.findall(r"^ *```\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for fence in fences for line in re.findall(rf"^ *({begin} (?:[^'\n]|'[^']*')*)", fence, re.MULTILINE)]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize(("document", "count"), [("deployments.md", 0), ("export.md", 5)])
def test_keepsteps_commands_of_a_document_parse(document: str, count: int):
    found = commands(document, "keepstep")
    assert len(found) == count
    for _, *arguments in found:
        build_parser().parse_args(arguments[: arguments.index("--")] if "--" in arguments else arguments)


@pytest.mark.parametrize(("document", "count"), [("deployments.md", 4), ("kuberay.md", 1)])
def test_runs_that_a_document_starts_are_of_deployments_and_their_settings_load(document: str, count: int):
    found = commands(document, "prefect deployment run")
    assert len(found) == count
    for line in found:
        flow, _, name = line[3].partition("/")
        assert flow == "grpo-train" and name in TRAINING
        given = dict(part.split("=", 1) for part in line if "=" in part)
        overrides = json.loads(given.get("overrides", "{}"))
        validate(load(name, [f"{key}={value}" for key, value in overrides.items()]))


def test_the_document_tells_every_deployment_and_schedule():
    text = (ROOT / "docs" / "deployments.md").read_text()
    for name, one in DEPLOYMENTS.items():
        flow = "checkpoint-audit" if name == "checkpoint-audit" else "grpo-train"
        (row,) = re.findall(rf"^\| `{flow}/{name}` \|(.*)\|$", text, re.MULTILINE)
        assert f"`{one['work_pool']['name']}`" in row
        for schedule in one.get("schedules", []):
            minute, hour, *_ = schedule["cron"].split()
            switch = "on" if schedule["active"] else "off"
            assert f"`{schedule['slug']}`, {int(hour):02d}:{int(minute):02d} {schedule['timezone']}, {switch}" in row
    assert set(re.findall(r"^\| (\w+) \(a failure\)", text, re.MULTILINE)) == set(AUDIT_ENDS) - {"Completed"}


# ---- form ----------------------------------------------------------------------------------------------------------


def test_a_filled_in_form_is_overrides_of_its_fields():
    filled: dict[str, Any] = {
        "output_dir": "/runs/a", "model_path": "/models/a", "train_files": ["a.parquet"], "val_files": ["b.parquet"],
        "total_training_steps": 40, "save_freq": 5, "learning_rate": 1e-5, "seed": 7, "s3_bucket": "b",
        "s3_prefix": "p", "resume_policy": "latest",
    }  # fmt: skip
    assert filled.keys() == TrainingForm.model_fields.keys() == form.SETTINGS.keys()
    overrides = TrainingForm(**filled).to_overrides()
    config = load("quickstart", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    for field, key in form.SETTINGS.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == filled[field], key
    assert TrainingForm().to_overrides() == {}
