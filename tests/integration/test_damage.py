"""Damaged checkpoints are rejected by name, set aside, and the next best is used; the run still ends the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.run import RunDir
from tests.conftest import OVERRIDES
from tests.integration.compare import differences
from tests.integration.driver import Driver

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_damaged_step_comes_back_from_the_store(workspace: Path, reference: Driver):
    """The store's good copy goes where the damaged one stood; with the last step there nothing is trained."""
    overrides = [*OVERRIDES, f"s3.prefix={reference.run.default_s3_prefix}"]
    copy = Driver(workspace / "repaired", overrides, command="train")
    shutil.copytree(reference.run.root, copy.run.root, symlinks=True)
    copy.run.result.unlink()
    flip(copy.run.checkpoint(44) / layout.ACTOR)
    assert copy.run_to_end() == 0, copy.tail()
    events = [
        (e["event"], e.get("step")) for e in copy.events() if e["attempt"] == 2 and e["event"] != "attempt_started"
    ]
    assert events[:4] == [
        ("checkpoint_rejected", 44), ("checkpoint_downloaded", 44), ("checkpoint_verified", 44), ("resumed", 44),
    ]  # fmt: skip
    assert "step" not in {event for event, _ in events}
    assert differences(copy.run.checkpoint(44), reference.run.checkpoint(44)) == []


def test_four_kinds_of_damage(workspace: Path, reference: Driver):
    """C61, C64, C65, C73: flipped byte, truncated file, missing file, another step's manifest.

    The step that is left has a damaged reference, which another step's copy mends.
    """
    copy = Driver(workspace / "damaged", [*OVERRIDES, "s3.embedded=false"], command="train")
    shutil.copytree(reference.run.root, copy.run.root, symlinks=True)
    copy.run.result.unlink()
    for step in (25, 30, 35, 40, 44):
        # Copied files share nothing, unlike hard-linked references: damaging one damages one.
        assert (copy.run.checkpoint(step) / layout.REF).stat().st_nlink == 1
    flip(copy.run.checkpoint(44) / layout.ACTOR)
    truncated = copy.run.checkpoint(40) / layout.OPTIMIZER
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    (copy.run.checkpoint(35) / layout.SCHEDULER).unlink()
    flip(copy.run.checkpoint(25) / layout.REF)
    shutil.copyfile(copy.run.checkpoint(20) / layout.MANIFEST, copy.run.checkpoint(30) / layout.MANIFEST)

    assert copy.run_to_end() == 0, copy.tail()

    rejected = {e["step"]: e["reason"] for e in copy.events() if e["event"] == "checkpoint_rejected"}
    assert sorted(rejected) == [30, 35, 40, 44]
    assert "actor/pytorch_model.bin: part 0 has SHA-256" in rejected[44]
    assert "actor/optimizer.pt:" in rejected[40] and "bytes, expected" in rejected[40]
    assert "actor/scheduler.pt: missing" in rejected[35]
    assert "manifest.json: is of step 20, the folder is step_30" in rejected[30]
    assert sorted(path.name for path in copy.run.quarantine.iterdir()) == [
        f"step_{step}.failed-verification.1" for step in (30, 35, 40, 44)
    ]
    assert [e["step"] for e in copy.events() if e["event"] == "resumed"] == [25]
    assert [(e["step"], e["source"]) for e in copy.events() if e["event"] == "reference_mended"] == [(25, "disk")]
    final = RunDir.at(copy.run.root).checkpoint(44)
    assert differences(final, reference.run.checkpoint(44)) == []
