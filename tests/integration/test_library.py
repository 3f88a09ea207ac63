"""The example of docs/library.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.reader import ACTOR, read_role
from keepstep.checkpoint.verify import verify
from keepstep.run import RunDir
from tests.integration.driver import REPOSITORY, clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def tensors_of(export: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(export / "model.safetensors")


def test_the_example_of_the_documents(workspace: Path):
    """Callbacks in order, a save that was asked for, exports in the middle and at the end, and a second `fit`."""
    (example,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "library.md").read_text(), re.DOTALL)
    folder = workspace / "library"
    folder.mkdir()
    (folder / "example.py").write_text(example + "trainer.fit()\n")
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, timeout=240,
        env=clean_environment() | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split()[0] for line in done.stdout.splitlines()]
    steps = [line for line in lines if line.isdecimal()]
    assert steps == ["1", "2", "3", "4", "5", "6", "6"]
    assert [line for line in done.stdout.splitlines() if line.startswith(("saved", "verified"))] == [
        f"{word} {step}" for step in (3, 4, 6) for word in ("saved", "verified")
    ]
    validated = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("validated")]
    assert validated == ["0", "6"] and lines[-1] == "done" and lines.count("done") == 2
    run = RunDir.at(folder / "runs" / "library")
    assert run.steps() == [4, 6], "keep_last_n=2"
    assert run.attempt_numbers() == [1], "the second fit had nothing to do"
    assert all(verify(run.checkpoint(step)).resumable for step in run.steps())
    middle, end = tensors_of(folder / "export_in_the_middle"), tensors_of(folder / "export_at_the_end")
    saved = read_role(run.checkpoint(6), ACTOR).tensors()
    assert all(torch.equal(end[name], value) for name, value in saved.items())
    assert not torch.equal(middle["model.norm.weight"], end["model.norm.weight"])
    assert (run.checkpoint(6) / layout.SCHEDULER).is_file()
    # Five steps of warm-up to 5e-4: the last step took all of it, and so would the next.
    assert "6 [0.0005]" in done.stdout.splitlines()
