"""Renders the Kubernetes manifests from one values file:

    python deployments/render.py [--values deployments/values.yaml] [--out build/manifests]

The templates are the YAML files of `kuberay/` and `kubernetes/`. A scalar that is only `${key}` becomes the value as it
is, also a mapping; inside a longer text it becomes text. Needs PyYAML and nothing else.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).resolve().parent
PLACEHOLDER = re.compile(r"\$\{([a-z_.]+)\}")
SECRET_OUT = "secret.yaml.template"
"""Not a name that `kubectl apply -f FOLDER` takes."""
TEMPLATES = {
    "ray-cluster": ("kubernetes/claim", "kubernetes/hooks", "kuberay/raycluster", "kubernetes/prefect-worker"),
    "ray-job": ("kubernetes/claim", "kubernetes/hooks", "kuberay/rayjob"),
    "one-node": ("kubernetes/hooks", "kubernetes/one-node"),
}
JOB_STOP_MARGIN_S = 15
"""Ray kills a trainer so long after its own grace has ended (RAY_JOB_STOP_WAIT_TIME_S)."""
FLOW_MARGIN_S = 80
"""A flow waits 20 s longer than the trainer's grace for its end, and then up to 60 s for its last task runs."""
POLL_MARGIN_S = 5
"""A hook waits a little longer than what it waits for may take."""
END_MARGIN_S = 10
"""Left after the hook, for Ray and the container to end."""


class ValuesError(Exception):
    """A values file that cannot be rendered."""


@dataclass(frozen=True)
class Storage:
    mount_path: str
    size: str
    storage_class: str


@dataclass(frozen=True)
class Head:
    cpu: str
    memory: str
    node_selector: dict[str, str]


@dataclass(frozen=True)
class GpuNodes:
    num_nodes: int
    num_gpus: int
    cpu: str
    memory: str
    shm: str
    node_selector: dict[str, str]
    taint: str


@dataclass(frozen=True)
class Job:
    arguments: list[str]


@dataclass(frozen=True)
class Values:
    """values.yaml, where each key is explained."""

    variant: Literal["ray-cluster", "ray-job", "one-node"]
    name: str
    namespace: str
    image: str
    ray_version: str
    secret: str
    work_pool: str
    term_grace_s: int
    storage: Storage
    head: Head
    gpu_nodes: GpuNodes
    job: Job


def read_values(path: Path) -> Values:
    """Raises `ValuesError` with the key that is unknown, missing or of another type."""
    try:
        values: Values = _section(Values, yaml.safe_load(path.read_text()), "")
    except (OSError, yaml.YAMLError, ValuesError) as error:
        raise ValuesError(f"{path}: {error}") from None
    if values.variant == "one-node" and values.gpu_nodes.num_nodes != 1:
        raise ValuesError(f"{path}: gpu_nodes.num_nodes is {values.gpu_nodes.num_nodes}; variant one-node has 1")
    folders = [a.removeprefix("trainer.output_dir=") for a in values.job.arguments if "trainer.output_dir=" in a]
    if values.variant == "ray-job" and not any(f.startswith(f"{values.storage.mount_path}/") for f in folders):
        raise ValuesError(
            f"{path}: job.arguments has no trainer.output_dir=… below {values.storage.mount_path}: "
            "the run's folder would be lost with its pod"
        )
    return values


def _section(cls: type, found: Any, where: str) -> Any:
    """`found` as the dataclass `cls`; `where` is the dotted key before it, with its dot."""
    if not isinstance(found, dict):
        raise ValuesError(f"{where.rstrip('.') or 'the file'} is {found!r}, expected a mapping")
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    for key in found:
        if key not in known:
            raise ValuesError(f"unknown key {where}{key}; known here: {', '.join(known)}")
    for key in known:
        if key not in found:
            raise ValuesError(f"{where}{key} is missing")
    return cls(**{key: _value(hints[key], found[key], f"{where}{key}") for key in known})


def _value(hint: Any, found: Any, key: str) -> Any:
    if is_dataclass(hint):
        return _section(typing.cast(type, hint), found, f"{key}.")
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        fits, expected = found in parts, "one of " + ", ".join(parts)
    elif origin is list:
        fits, expected = isinstance(found, list) and all(isinstance(e, str) for e in found), "a list of texts"
    elif origin is dict:
        items = found.items() if isinstance(found, dict) else [(None, None)]
        fits, expected = all(isinstance(part, str) for item in items for part in item), "a mapping of texts"
    elif hint is int:
        fits, expected = type(found) is int and found > 0, "a whole number above 0"
    else:
        fits, expected = isinstance(found, str) and found != "", 'a text (numbers in quotes, "8")'
    if not fits:
        raise ValuesError(f"{key} is {found!r}, expected {expected}")
    return found


def grace_periods(term_grace_s: int) -> dict[str, int]:
    """Seconds that hooks and pods get, from the grace of a trainer. Pure; the arithmetic is in docs/kuberay.md."""
    trainer_s = term_grace_s + JOB_STOP_MARGIN_S
    flow_s = term_grace_s + FLOW_MARGIN_S
    return {
        "ray_hook_s": trainer_s + POLL_MARGIN_S,
        "ray_pod_s": trainer_s + POLL_MARGIN_S + END_MARGIN_S,
        "flow_s": flow_s + POLL_MARGIN_S,
        "flow_pod_s": flow_s + POLL_MARGIN_S + END_MARGIN_S,
    }


def entrypoint(values: Values) -> str:
    """The command line of a RayJob: the flow beside the trainer that it submits, on the head."""
    given = [
        f"trainer.nnodes={values.gpu_nodes.num_nodes}",
        f"trainer.n_gpus_per_node={values.gpu_nodes.num_gpus}",
        f"retry.term_grace_s={values.term_grace_s}",
        "ray.address=http://127.0.0.1:8265",
    ]
    return shlex.join(["keepstep", "run", *values.job.arguments, *given])


def render(values: Values) -> dict[str, str]:
    """File name to content."""
    grace = grace_periods(values.term_grace_s)
    known: dict[str, Any] = {**asdict(values), "grace": grace}
    known["job"]["entrypoint"] = entrypoint(values)
    known["hooks"] = {
        "leave_ray": (HERE / "kuberay/leave_ray.py").read_text(),
        "leave_flows": (HERE / "kubernetes/leave_flows.py").read_text(),
        "ray_timeout_s": str(grace["ray_hook_s"]),
        "flow_timeout_s": str(grace["flow_s"]),
    }
    known["ray_cluster_spec"] = _filled("kuberay/raycluster", known)["spec"]
    names = {f"{Path(name).name}.yaml": name for name in TEMPLATES[values.variant]}
    names[SECRET_OUT] = "kubernetes/secret"
    return {out: _dump(_filled(name, known)) for out, name in names.items()}


def _filled(template: str, known: dict[str, Any]) -> Any:
    return _fill(yaml.safe_load((HERE / f"{template}.yaml").read_text()), known)


def _fill(node: Any, known: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: _fill(value, known) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(value, known) for value in node]
    if not isinstance(node, str):
        return node
    whole = PLACEHOLDER.fullmatch(node)
    return _look_up(whole[1], known) if whole else PLACEHOLDER.sub(lambda m: str(_look_up(m[1], known)), node)


def _look_up(key: str, known: dict[str, Any]) -> Any:
    found: Any = known
    for part in key.split("."):
        found = found[part]
    return found


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks; the same mapping twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(manifest: Any) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Render the Kubernetes manifests.")
    parser.add_argument("--values", type=Path, default=HERE / "values.yaml")
    parser.add_argument("--out", type=Path, default=Path("build/manifests"))
    args = parser.parse_args(arguments)
    try:
        values = read_values(args.values)
    except ValuesError as error:
        print(f"render: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name, content in render(values).items():
        (args.out / name).write_text(content)
        print(args.out / name)
    if values.variant == "one-node":
        print(
            f"trainer.output_dir below {values.storage.mount_path} is node-local: it is lost with the pod, and a run "
            "goes on from what the S3 store has confirmed."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
