"""The Kubernetes manifests: valid against KubeRay's schemas, one layer of retries, enough grace, no secret in them."""

from __future__ import annotations

import ast
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from keepstep.config.load import load
from keepstep.config.schema import RetryConfig
from keepstep.controller import launch

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
SCHEMAS = ROOT / "tests/data/crds"
VARIANTS = {
    "ray-cluster": {"claim.yaml", "hooks.yaml", "raycluster.yaml", "prefect-worker.yaml", "secret.yaml.template"},
    "ray-job": {"claim.yaml", "hooks.yaml", "rayjob.yaml", "secret.yaml.template"},
    "one-node": {"hooks.yaml", "one-node.yaml", "secret.yaml.template"},
}


def values(variant: str, **changes: Any) -> dict[str, Any]:
    """The shipped values as one variant; `gpu_nodes__num_nodes=1` changes a nested one."""
    found = yaml.safe_load((DEPLOYMENTS / "values.yaml").read_text()) | {"variant": variant}
    if variant == "one-node":
        found["gpu_nodes"]["num_nodes"] = 1
    for key, value in changes.items():
        *above, last = key.split("__")
        section = found
        for part in above:
            section = section[part]
        section[last] = value
    return found


def run_render(folder: Path, found: Any) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The script's answer and the files that it wrote."""
    source, out = folder / "values.yaml", folder / "out"
    source.write_text(yaml.safe_dump(found))
    command = [sys.executable, str(DEPLOYMENTS / "render.py"), "--values", str(source), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, {path.name: path.read_text() for path in out.iterdir()} if out.exists() else {}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Per variant the rendered files."""
    found = {}
    for variant in VARIANTS:
        done, found[variant] = run_render(tmp_path_factory.mktemp(variant), values(variant))
        assert done.returncode == 0, done.stderr
    return found


def manifest(rendered: dict[str, dict[str, str]], variant: str, name: str) -> dict[str, Any]:
    return yaml.safe_load(rendered[variant][name])


def pod_specs(rendered: dict[str, dict[str, str]], variant: str) -> dict[str, dict[str, Any]]:
    """Pod specs by what runs in them."""
    found = {}
    for name, text in rendered[variant].items():
        spec = yaml.safe_load(text).get("spec", {})
        cluster = spec.get("rayClusterSpec", spec)
        if "headGroupSpec" in cluster:
            found["head"] = cluster["headGroupSpec"]["template"]["spec"]
            found["gpu"] = cluster["workerGroupSpecs"][0]["template"]["spec"]
        elif "template" in spec:
            found[name] = spec["template"]["spec"]
    return found


def strict(node: Any) -> Any:
    """A Kubernetes schema as JSON schema that takes no unknown field, as the API server's strict validation does."""
    if isinstance(node, list):
        return [strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    made = {key: strict(value) for key, value in node.items()}
    open_ended = made.get("x-kubernetes-preserve-unknown-fields") or made.get("x-kubernetes-embedded-resource")
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made and not open_ended:
        made["additionalProperties"] = False
    return made


def schema(kind: str) -> dict[str, Any]:
    return strict(json.loads((SCHEMAS / f"{kind}.json").read_text()))


def pod_template_schema() -> dict[str, Any]:
    """Kubernetes' own schema of a pod template, as KubeRay's definition embeds it."""
    return schema("RayCluster")["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]["template"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_its_files_and_the_same_bytes_again(rendered, variant: str, tmp_path: Path):
    _, again = run_render(tmp_path, values(variant))
    assert set(rendered[variant]) == VARIANTS[variant]
    assert again == rendered[variant]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_placeholder_is_left(rendered, variant: str):
    assert not [name for name, text in rendered[variant].items() if re.search(r"\$\{", text)]


def test_shipped_values_render_the_ray_cluster(tmp_path: Path):
    command = [sys.executable, str(DEPLOYMENTS / "render.py"), "--out", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == VARIANTS["ray-cluster"]


@pytest.mark.parametrize(
    ("variant", "name", "kind"),
    [("ray-cluster", "raycluster.yaml", "RayCluster"), ("ray-job", "rayjob.yaml", "RayJob")],
)
def test_kuberay_objects_follow_the_published_schema(rendered, variant: str, name: str, kind: str):
    found = manifest(rendered, variant, name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    jsonschema.validate(found, schema(kind))


@pytest.mark.parametrize(("variant", "name"), [("ray-cluster", "prefect-worker.yaml"), ("one-node", "one-node.yaml")])
def test_deployments_have_a_valid_pod_and_select_it(rendered, variant: str, name: str):
    found = manifest(rendered, variant, name)
    assert (found["apiVersion"], found["kind"]) == ("apps/v1", "Deployment")
    assert set(found["spec"]) == {"replicas", "strategy", "selector", "template"}
    selected = found["spec"]["selector"]["matchLabels"].items()
    assert selected <= found["spec"]["template"]["metadata"]["labels"].items()
    pod = found["spec"]["template"]
    jsonschema.validate({"spec": pod["spec"]}, pod_template_schema())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroupSpec", "template", "spec", "terminationGracePeriod"), 60),
        (("spec", "workerGroupSpecs", 0, "replicas"), "4"),
        (("spec", "workerGroupSpecs", 0, "groupName"), None),
    ],
    ids=["unknown field", "wrong type", "missing field"],
)
def test_the_schema_check_can_fail(rendered, path: tuple[Any, ...], value: Any):
    found = manifest(rendered, "ray-cluster", "raycluster.yaml")
    section: Any = found
    for part in path[:-1]:
        section = section[part]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema("RayCluster"))


def test_kubernetes_never_starts_a_run_a_second_time(rendered):
    """C127: exactly one layer retries, and it is the flow's."""
    job = manifest(rendered, "ray-job", "rayjob.yaml")["spec"]
    assert job["backoffLimit"] == 0
    # Any other mode has a submitter pod, of which a Kubernetes Job makes another one.
    assert job["submissionMode"] == "HTTPMode"
    for variant, name in (("ray-cluster", "prefect-worker.yaml"), ("one-node", "one-node.yaml")):
        spec = manifest(rendered, variant, name)["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_a_ray_job_runs_the_flow_on_the_head_with_what_the_values_say(rendered):
    job = manifest(rendered, "ray-job", "rayjob.yaml")["spec"]
    command = job["entrypoint"].split()
    assert command[:2] == ["keepstep", "run"]
    assert {
        "trainer.output_dir=/runs/mine", "trainer.nnodes=4", "trainer.n_gpus_per_node=8",
        "retry.term_grace_s=30", "ray.address=http://127.0.0.1:8265",
    } <= set(command)  # fmt: skip
    waits_s = int(yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert waits_s >= 30 + flow_waits_s()


def flow_waits_s() -> float:
    """What the flow waits beyond the trainer's grace, from its source: `term_grace_s + X`, and its last tasks."""
    tree = ast.parse((ROOT / "flows/grpo_train.py").read_text())
    sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and "term_grace_s" in ast.unparse(node.left)]
    (after_grace,) = [ast.literal_eval(node.right) for node in sums]
    (last_tasks,) = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAST_TASKS_TIMEOUT_S"
    ]
    return after_grace + last_tasks


@pytest.mark.parametrize("term_grace_s", [int(RetryConfig().term_grace_s), 90])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hooks_outlast_the_trainer_and_pods_outlast_their_hooks(tmp_path: Path, variant: str, term_grace_s: int):
    _, files = run_render(tmp_path, values(variant, term_grace_s=term_grace_s))
    settings = load("quickstart", [f"retry.term_grace_s={term_grace_s}"])
    ray_kills_s = int(launch._variables(settings)["RAY_JOB_STOP_WAIT_TIME_S"])
    pods = pod_specs({variant: files}, variant)
    assert pods
    for name, pod in pods.items():
        (container,) = pod["containers"]
        *_, script, timeout_s = [
            part for part in container["lifecycle"]["preStop"]["exec"]["command"] if part not in ("head", "worker")
        ]
        needed_s = ray_kills_s if name in ("head", "gpu") else term_grace_s + flow_waits_s()
        assert script.removeprefix("/etc/keepstep/") in yaml.safe_load(files["hooks.yaml"])["data"]
        assert int(timeout_s) > needed_s
        assert pod["terminationGracePeriodSeconds"] > int(timeout_s)


@pytest.mark.parametrize(
    ("variant", "pod"), [("ray-cluster", "gpu"), ("ray-job", "gpu"), ("one-node", "one-node.yaml")]
)
def test_gpu_pods_go_where_preemptible_nodes_are(rendered, variant: str, pod: str):
    spec = pod_specs(rendered, variant)[pod]
    assert {"key": "keepstep/preemptible", "operator": "Exists"} in spec["tolerations"]
    assert spec["nodeSelector"] == {"keepstep/pool": "gpu-preemptible"}
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    ("variant", "pod"), [("ray-cluster", "head"), ("ray-job", "head"), ("ray-cluster", "prefect-worker.yaml")]
)
def test_head_and_prefect_worker_stay_off_preemptible_nodes(rendered, variant: str, pod: str):
    spec = pod_specs(rendered, variant)[pod]
    assert "tolerations" not in spec
    assert spec["nodeSelector"] == {"keepstep/pool": "stable"}


@pytest.mark.parametrize("variant", ["ray-cluster", "ray-job"])
def test_every_pod_of_a_cluster_sees_the_one_claim(rendered, variant: str):
    claim = manifest(rendered, variant, "claim.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for spec in pod_specs(rendered, variant).values():
        volume = next(volume for volume in spec["volumes"] if volume["name"] == "runs")
        mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "runs")
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mount["mountPath"] == "/runs"


def test_the_node_local_variant_has_no_shared_volume_and_says_so(tmp_path: Path):
    """C170: what is on a node's disk is not yet what survives the node."""
    done, files = run_render(tmp_path, values("one-node"))
    assert not any("persistentVolumeClaim" in text or "PersistentVolumeClaim" in text for text in files.values())
    assert "node-local" in yaml.safe_load(files["one-node.yaml"])["metadata"]["annotations"]["keepstep/output-dir"]
    assert "node-local" in done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_has_probes_resources_and_secrets_by_reference(rendered, variant: str):
    secret = yaml.safe_load(rendered[variant]["secret.yaml.template"])
    for pod in pod_specs(rendered, variant).values():
        (container,) = pod["containers"]
        assert container["readinessProbe"]["httpGet"] and container["livenessProbe"]["httpGet"]
        assert container["resources"]["requests"]["memory"] and container["resources"]["limits"]["memory"]
        assert container["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
        assert "env" not in container
        assert pod["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_secret_is_a_template_without_a_value(rendered, variant: str):
    """It is not applied with the rest of the folder, and holds names only."""
    secret = yaml.safe_load(rendered[variant]["secret.yaml.template"])
    assert secret["stringData"] and set(secret["stringData"].values()) == {""}
    assert not [name for name, text in rendered[variant].items() if name.endswith(".yaml") and "kind: Secret" in text]


def test_deployments_name_no_package_index_and_no_key():
    sources = [path for folder in ("kuberay", "kubernetes", "docker") for path in (DEPLOYMENTS / folder).rglob("*.*")]
    sources += [DEPLOYMENTS / "docker/Dockerfile", DEPLOYMENTS / "values.yaml", DEPLOYMENTS / "render.py"]
    for source in sources:
        text = source.read_text()
        hosts = set(re.findall(r"https?://([^\s/:\"'}]+)", text))
        assert hosts <= {"127.0.0.1", "{head"}, source
        assert not re.search(r"AKIA[0-9A-Z]{16}|-----BEGIN|--(extra-)?index-url", text), source


def test_the_image_has_both_targets_and_copies_what_exists():
    text = (DEPLOYMENTS / "docker/Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert targets == ["cpu", "gpu"]
    copied = {source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    # What `pip install .` needs must not be ignored.
    ignored = (DEPLOYMENTS / "docker/Dockerfile.dockerignore").read_text().split()
    assert not {"keepstep", "flows", "tasks", "configs", "deployments", "README.md", "pyproject.toml"} & set(ignored)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (values("ray-cluster") | {"nmae": "x"}, "unknown key nmae"),
        (values("ray-cluster", head__gpu="1"), "unknown key head.gpu"),
        ({key: value for key, value in values("ray-cluster").items() if key != "image"}, "image is missing"),
        (values("ray-cluster", head__cpu=8), "head.cpu is 8, expected a text"),
        (values("ray-cluster", gpu_nodes__num_nodes="4"), "gpu_nodes.num_nodes is '4', expected a whole number"),
        (values("ray-cluster", gpu_nodes__node_selector={"a": 1}), "gpu_nodes.node_selector"),
        (values("ray-cluster", job__arguments="--config x"), "job.arguments is '--config x', expected a list"),
        (values("helm"), "variant is 'helm', expected one of ray-cluster, ray-job, one-node"),
        (values("one-node", gpu_nodes__num_nodes=2), "gpu_nodes.num_nodes is 2; variant one-node has 1"),
        (values("ray-job", job__arguments=["trainer.output_dir=/tmp/x"]), "lost with its pod"),
        (["no", "mapping"], "expected a mapping"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_values_are_checked_by_key(tmp_path: Path, found: Any, message: str):
    done, files = run_render(tmp_path, found)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert files == {}


def test_the_document_tells_the_grace_periods_that_are_rendered(rendered):
    """docs/kuberay.md: the column for the default grace of 30 s."""
    text = (ROOT / "docs/kuberay.md").read_text()
    told = {row[0]: int(row[-1]) for row in re.findall(r"^\| (.+?) \|.*\| (\d+) \|$", text, re.MULTILINE)}
    assert RetryConfig().term_grace_s == told["trainer"] == 30
    head, flow = (
        pod_specs(rendered, "ray-cluster")[name]
        for name in ("head", "prefect-worker.yaml")
    )  # fmt: skip
    command = [spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] for spec in (head, flow)]
    assert [int(timeout_s) for timeout_s in command] == [
        told["`leave_ray.py`, pre-stop hook of Ray's pods"], told["`leave_flows.py`, hook of the Prefect worker"]
    ]  # fmt: skip
    assert head["terminationGracePeriodSeconds"] == told["Ray pods, `terminationGracePeriodSeconds`"]
    assert flow["terminationGracePeriodSeconds"] == told["its pod"]


# ---- hooks -----------------------------------------------------------------------------------------------------------


class JobServer(http.server.ThreadingHTTPServer):
    """Ray's job server as far as the hook asks it: jobs end at the second look after their stop."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), JobHandler)
        self.stopped: list[str] = []
        self.looks = 0
        trainer = "python -m keepstep.cli.main train --from-env --events-stdout"
        self.jobs = [
            {"submission_id": "trainer", "status": "RUNNING", "entrypoint": trainer},
            {"submission_id": "flow", "status": "RUNNING", "entrypoint": "keepstep run --config x"},
            {"submission_id": "old", "status": "SUCCEEDED", "entrypoint": trainer},
            {"submission_id": None, "status": "RUNNING", "entrypoint": trainer},
        ]


class JobHandler(http.server.BaseHTTPRequestHandler):
    server: JobServer

    def do_GET(self) -> None:
        if self.server.stopped:
            self.server.looks += 1
        for job in self.server.jobs:
            if job["submission_id"] in self.server.stopped and self.server.looks >= 2:
                job["status"] = "STOPPED"
        self._answer(self.server.jobs)

    def do_POST(self) -> None:
        self.server.stopped.append(self.path.split("/")[-2])
        self._answer({"stopped": True})

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def job_server() -> Iterator[JobServer]:
    with JobServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def hook(name: str) -> dict[str, Any]:
    """The names of a hook's script."""
    found: dict[str, Any] = {"__name__": "hook"}
    exec(compile((DEPLOYMENTS / name).read_text(), name, "exec"), found)
    return found


@pytest.mark.parametrize(("role", "expected"), [("worker", ["trainer"]), ("head", ["trainer", "flow"])])
def test_a_ray_pod_stops_the_trainers_and_only_the_head_stops_a_flow(job_server: JobServer, role: str, expected: list):
    """C124: a worker that is evicted ends an attempt, not the run: the flow goes on and starts the next one."""
    names = hook("kuberay/leave_ray.py")
    url = f"http://127.0.0.1:{job_server.server_port}"
    jobs = names["stop"](url, role)
    assert jobs == expected == job_server.stopped
    assert names["wait"](url, jobs, time.monotonic() + 30) == []
    assert job_server.looks >= 2


def test_the_hook_knows_a_trainer_by_the_command_that_is_submitted():
    """The hook runs without Keepstep, so it has its own copy of that text."""
    assert (
        f"{hook('kuberay/leave_ray.py')['TRAINER']} --from-env" in (ROOT / "keepstep/controller/launch.py").read_text()
    )


def test_a_wait_ends_at_its_deadline_and_names_who_is_late(job_server: JobServer):
    names = hook("kuberay/leave_ray.py")
    url = f"http://127.0.0.1:{job_server.server_port}"
    assert names["wait"](url, ["flow"], time.monotonic() + 1) == ["flow"]


def test_a_dead_job_server_fails_no_pod():
    command = [sys.executable, str(DEPLOYMENTS / "kuberay/leave_ray.py"), "worker", "5"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"FQ_RAY_IP": "keepstep.invalid"}
    )
    assert done.returncode == 0
    assert "the jobs were not stopped" in done.stderr


WORKER = r"""
import os, signal, subprocess, sys
child = '''
import os, signal, sys, time
def leave(*_):
    time.sleep(0.5)
    os.write(1, b"saved\\n")
    sys.exit()
signal.signal(signal.SIGTERM, leave)
os.write(1, b"up\\n")
time.sleep(60)
'''
def stop(*_):
    # As Prefect's worker does.
    for process in processes:
        process.kill()
signal.signal(signal.SIGTERM, stop)
processes = [subprocess.Popen([sys.executable, "-c", child]) for _ in range(2)]
for process in processes:
    process.wait()
"""


def test_flows_are_told_by_the_hook_before_their_worker_would_kill_them():
    """C124: each flow process gets SIGTERM and its time; the worker hears nothing of it."""
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert [worker.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        assert hook("kubernetes/leave_flows.py")["leave"](worker.pid, time.monotonic() + 30) == []
        told = worker.communicate(timeout=30)[0].split()
        assert told == ["saved", "saved"]
    finally:
        worker.kill()


def test_a_flow_that_stays_is_named_at_the_deadline():
    stubborn = "import os,signal,time; signal.signal(15, signal.SIG_IGN); os.write(1, b'up\\n'); time.sleep(60)"
    code = (
        "import signal, subprocess, sys; signal.signal(15, lambda *_: None);"
        f"subprocess.Popen([sys.executable, '-c', {stubborn!r}]).wait()"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    names = hook("kubernetes/leave_flows.py")
    flows: list[int] = []
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        flows = names["children"](worker.pid)
        assert len(flows) == 1
        assert names["leave"](worker.pid, time.monotonic() + 1) == flows
    finally:
        for pid in flows:
            os.kill(pid, signal.SIGKILL)
        worker.communicate(timeout=30)
