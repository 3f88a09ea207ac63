"""Commands that only look import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.run import RunDir, write_json
from tests.unit import builder

HEAVY = {"torch", "ray", "vllm", "prefect", "transformers", "s3fs", "botocore", "numpy", "tensorboard"}
REPORT = """
import json, sys
from keepstep.cli.main import main
status = main(sys.argv[1:])
packages = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"status": status, "modules": packages}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """A run with two checkpoints, as a trainer leaves it."""
    run = builder.run_in(tmp_path_factory.mktemp("light"))
    builder.write(run, 20)
    builder.write(run, 40, reference_step=20)
    write_json(run.record, {"run_id": "run-a", "dataset": {"files": [], "num_rows": 640, "val_files": []}})
    run.config.write_text(resolved_config(run))
    return run


def resolved_config(run: RunDir) -> str:
    command = [sys.executable, "-m", "keepstep.cli.main", "train", "--dry-run", f"trainer.output_dir={run.root}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def report(*arguments: str) -> dict:
    """Exit status and imported packages of a command in a fresh interpreter."""
    command = [sys.executable, "-c", REPORT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stderr.splitlines()[-1])


def test_the_controller_leaves_heavy_imports_to_its_loading_thread():
    """Ray starts meanwhile; and two threads that import transformers at once may each find the other's half."""
    script = "import sys, keepstep.controller.training; print({'torch', 'transformers'} & set(sys.modules))"
    assert python(script).stdout == "set()\n"


@pytest.mark.parametrize("command", ["verify", "verify --quick", "ls", "plan", "doctor"])
def test_looking_is_light(run: RunDir, command: str):
    name, *flags = command.split()
    target = run.checkpoint(40) if name == "verify" else run.root
    found = report(name, str(target), *flags)
    assert found["status"] == 0
    assert not HEAVY & set(found["modules"])
    assert "pyarrow" not in found["modules"]


def test_taking_nothing_down_is_light(tmp_path: Path):
    found = report("down", str(tmp_path))
    assert found["status"] == 0
    assert not (HEAVY | {"pyarrow"}) & set(found["modules"])


def test_dataset_check_is_light(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    found = report("dataset", "check", str(path), "--expect-rows", "2")
    assert found["status"] == 0
    # Parquet is read in a process of its own, so not even pyarrow is in this one.
    assert not (HEAVY | {"pyarrow"}) & set(found["modules"])


LIGHT_MODULES = [
    "keepstep.attempts",
    "keepstep.audit",
    "keepstep.checkpoint.digest",
    "keepstep.checkpoint.history",
    "keepstep.checkpoint.inventory",
    "keepstep.checkpoint.layout",
    "keepstep.checkpoint.manifest",
    "keepstep.checkpoint.plan",
    "keepstep.checkpoint.publish",
    "keepstep.checkpoint.retention",
    "keepstep.checkpoint.select",
    "keepstep.checkpoint.verify",
    "keepstep.cli.main",
    "keepstep.cli.platform_command",
    "keepstep.config.load",
    "keepstep.data.count",
    "keepstep.data.file_check",
    "keepstep.data.loader",
    "keepstep.data.logged",
    "keepstep.data.offset",
    "keepstep.data.reader",
    "keepstep.data.record",
    "keepstep.data.row_digest",
    "keepstep.data.spec",
    "keepstep.data.trouble",
    "keepstep.doctor.rules",
    "keepstep.events.log",
    "keepstep.platform.automations",
    "keepstep.platform.guard",
    "keepstep.preflight.checks",
    "keepstep.preflight.start",
    "keepstep.processes",
    "keepstep.run",
]


def test_light_modules_import_nothing_heavy():
    script = f"import sys, {', '.join(LIGHT_MODULES)}; print(' '.join({{n.partition('.')[0] for n in sys.modules}}))"
    assert not (HEAVY | {"pyarrow"}) & set(python(script).stdout.split())
