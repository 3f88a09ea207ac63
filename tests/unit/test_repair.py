"""A damaged reference is mended from any copy that has the manifest's digest, in every step that shares it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.plan import plan
from keepstep.checkpoint.publish import quarantine
from keepstep.checkpoint.repair import from_disk, from_model, mend_reference
from keepstep.checkpoint.verify import verify
from keepstep.run import RunDir
from tests.unit import builder

NO_FENCE = lambda: None  # noqa: E731


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two steps that share a reference of which one byte is wrong."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    builder.write(run, 40, reference_step=20)
    path = run.checkpoint(20) / layout.REF
    whole = path.read_bytes()
    (tmp_path / "whole").write_bytes(whole)
    with path.open("r+b") as file:
        file.seek(len(whole) // 2)
        file.write(bytes([whole[len(whole) // 2] ^ 1]))
    assert not verify(run.checkpoint(20)).resumable and not verify(run.checkpoint(40)).resumable
    return run


def manifest_of(run: RunDir, step: int):
    return parse((run.checkpoint(step) / layout.MANIFEST).read_bytes())


def test_the_plan_takes_the_step_and_says_so(run: RunDir):
    found = plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None, expected_run_id="run-a")
    assert (found.step, found.repair, found.rejections) == (40, True, [])
    assert "its reference is damaged and will be mended" in found.describe()[-1]


def test_other_damage_is_not_mended(run: RunDir):
    (run.checkpoint(40) / layout.OPTIMIZER).write_bytes(b"torn")
    found = plan(run, policy="latest", prefer_multiple=100, max_rewind_steps=None, expected_run_id="run-a")
    assert (found.step, found.repair, [rejection.step for rejection in found.rejections]) == (20, True, [40])


def test_mended_from_a_copy_on_this_disk(run: RunDir):
    """A step that was set aside for another reason still has a whole reference of its own."""
    builder.write(run, 60)
    quarantine(run, run.checkpoint(60), 60, "failed-verification", NO_FENCE)
    assert mend_reference(run, manifest_of(run, 40), {"disk": from_disk(run)}, NO_FENCE) == {layout.REF: "disk"}
    assert verify(run.checkpoint(20)).resumable and verify(run.checkpoint(40)).resumable
    assert os.path.samefile(run.checkpoint(20) / layout.REF, run.checkpoint(40) / layout.REF)


def test_mended_from_the_model(run: RunDir, tmp_path: Path):
    tensors = torch.load(tmp_path / "whole", weights_only=True)
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    sources = {"disk": from_disk(run), "model": from_model(tmp_path / "base", manifest_of(run, 40))}
    assert mend_reference(run, manifest_of(run, 40), sources, NO_FENCE) == {layout.REF: "model"}
    assert verify(run.checkpoint(40)).resumable


def test_a_source_with_other_bytes_mends_nothing(run: RunDir, tmp_path: Path):
    tensors = {name: tensor + 1 for name, tensor in torch.load(tmp_path / "whole", weights_only=True).items()}
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")

    def liar(name: str, digest: FileDigest, target: Path) -> bool:
        target.write_bytes(b"something else")
        return True

    before = (run.checkpoint(40) / layout.REF).read_bytes()
    sources = {"store": liar, "disk": from_disk(run), "model": from_model(tmp_path / "base", manifest_of(run, 40))}
    assert mend_reference(run, manifest_of(run, 40), sources, NO_FENCE) == {}
    assert (run.checkpoint(40) / layout.REF).read_bytes() == before
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".tmp")] == []


def test_a_missing_reference_is_mended(run: RunDir, tmp_path: Path):
    (run.checkpoint(40) / layout.REF).unlink()

    def store(name: str, digest: FileDigest, target: Path) -> bool:
        target.write_bytes((tmp_path / "whole").read_bytes())
        return True

    assert mend_reference(run, manifest_of(run, 40), {"store": store}, NO_FENCE) == {layout.REF: "store"}
    assert verify(run.checkpoint(40)).resumable
