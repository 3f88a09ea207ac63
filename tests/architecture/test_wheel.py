"""What a wheel holds: the three packages and the packaged configurations, nothing else at its top."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import keepstep

ROOT = Path(__file__).parents[2]


def test_wheel_contents(tmp_path: Path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"keepstep-{keepstep.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"keepstep", "flows", "tasks"}
    for config in (ROOT / "configs").glob("*.yaml"):
        assert f"keepstep/config/files/{config.name}" in names
    for deployment in ("prefect.yaml", "automations.yaml", "notifications.yaml"):
        assert f"keepstep/platform/files/{deployment}" in names
    assert "flows/grpo_train.py" in names and "keepstep/controller/trainer.py" in names
