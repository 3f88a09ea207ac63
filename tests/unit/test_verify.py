"""Verification: every mutation is rejected and named; nothing is executed or followed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.checkpoint.verify import verify
from keepstep.run import RunDir
from tests.unit import builder


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    run = builder.run_in(tmp_path_factory.mktemp("pristine"))
    builder.write(run, 20)
    builder.write(run, 40, reference_step=20)
    return run.root


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> RunDir:
    shutil.copytree(pristine, tmp_path / "run")
    return RunDir.at(tmp_path / "run")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_file_every_kind_of_damage(run: RunDir):
    """C61, C64, C74: truncated, emptied, missing, flipped at random places, replaced by the other step's."""
    folder, generator = run.checkpoint(20), random.Random(1)
    num_mutations = 0
    for path in files_of(folder):
        original = path.read_bytes()
        name = str(path.relative_to(folder))
        mutations = {"truncated": original[: len(original) // 2], "emptied": b"", "longer": original + b"\0"}
        for number in range(5):
            position, bit = generator.randrange(len(original)), 1 << generator.randrange(8)
            flipped = bytearray(original)
            flipped[position] ^= bit
            mutations[f"flip {number}"] = bytes(flipped)
        for kind, content in mutations.items():
            path.write_bytes(content)
            verdict = verify(folder)
            assert verdict.state == "rejected", f"{kind} {name} was accepted"
            assert any(name in reason for reason in verdict.reasons), (kind, name, verdict.reasons)
            num_mutations += 1
        path.unlink()
        # What the engine held is informative.
        expected = "verified" if layout.is_optional(name) else "rejected"
        assert verify(folder).state == expected, f"{name} missing"
        path.write_bytes(original)
    assert verify(folder).resumable
    assert num_mutations == 8 * len(files_of(folder))


def test_files_swapped_between_checkpoints(run: RunDir):
    for name in (layout.ACTOR, layout.OPTIMIZER, layout.TRAINER_STATE, layout.MANIFEST):
        other = (run.checkpoint(40) / name).read_bytes()
        mine = (run.checkpoint(20) / name).read_bytes()
        (run.checkpoint(20) / name).write_bytes(other)
        assert verify(run.checkpoint(20)).state == "rejected", name
        (run.checkpoint(20) / name).write_bytes(mine)


def test_renamed_step_is_rejected(run: RunDir):
    """C73: a folder of another step under this name."""
    shutil.rmtree(run.checkpoint(40))
    os.rename(run.checkpoint(20), run.checkpoint(40))
    verdict = verify(run.checkpoint(40))
    assert verdict.reasons[0] == "manifest.json: is of step 20, the folder is step_40"


def test_foreign_run_is_rejected(run: RunDir):
    verdict = verify(run.checkpoint(20), expected_run_id="run-b")
    assert verdict.reasons == ["manifest.json: belongs to run run-a, expected run-b"]


def test_unlisted_file_is_named(run: RunDir):
    (run.checkpoint(20) / "actor" / "extra.bin").write_bytes(b"x")
    assert verify(run.checkpoint(20)).reasons == ["actor/extra.bin: foreign file, the manifest does not list it"]


def test_rollout_folder_may_be_gone(run: RunDir):
    shutil.rmtree(run.checkpoint(20) / "rollout")
    assert verify(run.checkpoint(20)).resumable


def test_link_out_of_the_folder_is_not_followed(run: RunDir, tmp_path: Path):
    target = run.checkpoint(20) / layout.ACTOR
    outside = tmp_path / "outside.bin"
    outside.write_bytes(target.read_bytes())
    target.unlink()
    target.symlink_to(outside)
    assert any("not a regular file" in reason for reason in verify(run.checkpoint(20)).reasons)


def test_quick_does_not_hash_but_sees_sizes(run: RunDir):
    path = run.checkpoint(20) / "tokenizer" / "config.json"
    path.write_bytes(b"[]")
    assert verify(run.checkpoint(20), quick=True).resumable
    path.write_bytes(b"[] ")
    assert verify(run.checkpoint(20), quick=True).state == "rejected"


def test_no_manifest_inside_a_run_is_rejected(run: RunDir):
    """C62, C65: files without the mark that is written last are not a checkpoint."""
    (run.checkpoint(20) / layout.MANIFEST).unlink()
    assert verify(run.checkpoint(20)).reasons == ["manifest.json: missing, the checkpoint was never finished"]


def test_no_manifest_elsewhere_is_unverified(run: RunDir, tmp_path: Path):
    """C68: good files of another tool are told apart from broken ones, and never resumed from by themselves."""
    foreign = tmp_path / "elsewhere" / "deep" / "step_20"
    shutil.copytree(run.checkpoint(20), foreign)
    (foreign / layout.MANIFEST).unlink()
    verdict = verify(foreign)
    assert (verdict.state, verdict.ok, verdict.resumable, verdict.step) == ("unverified", True, False, 20)
    (foreign / layout.OPTIMIZER).unlink()
    assert verify(foreign).reasons == ["actor/optimizer.pt: missing"]


def test_executable_pickle_is_named_and_not_executed(run: RunDir, tmp_path: Path):
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (os.system, (f"touch {marker}",))

    foreign = tmp_path / "elsewhere" / "deep" / "step_20"
    shutil.copytree(run.checkpoint(20), foreign)
    (foreign / layout.MANIFEST).unlink()
    with zipfile.ZipFile(foreign / layout.ACTOR, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(), protocol=2))
    verdict = verify(foreign)
    assert verdict.state == "rejected"
    assert any("system, which would run code" in reason for reason in verdict.reasons)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": 1, "a": 2}', "[" * 1_000_000, "", "{}", "null", '"x"'],
    ids=["nan", "duplicate", "deep", "empty", "object", "null", "string"],
)
def test_hostile_json_is_rejected_with_a_reason(run: RunDir, text: str):
    """C62: an empty or foreign state, and JSON that readers disagree about."""
    (run.checkpoint(20) / layout.MANIFEST).write_text(text)
    verdict = verify(run.checkpoint(20))
    assert verdict.state == "rejected"
    assert verdict.reasons[0].startswith("manifest.json: ")


def test_manifest_that_points_outside_is_rejected(run: RunDir):
    from keepstep.checkpoint.manifest import seal

    path = run.checkpoint(20) / layout.MANIFEST
    value = json.loads(path.read_bytes())
    del value["self"]
    value["files"]["../../../etc/passwd"] = value["files"][layout.CONFIG]
    path.write_bytes(seal(value))
    assert "is not a plain path inside the checkpoint" in verify(run.checkpoint(20)).reasons[0]


def test_not_a_folder(tmp_path: Path):
    assert verify(tmp_path / "nothing").reasons == ["not a folder"]


def foreign(run: RunDir, folder: Path, *names: str) -> Path:
    """A folder of another trainer with these files of a checkpoint."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run.checkpoint(20) / name, folder / name)
    return folder


def test_weights_alone_are_called_that(run: RunDir, tmp_path: Path):
    """C5: an export can be made of it, a resume cannot."""
    verdict = verify(foreign(run, tmp_path / "elsewhere" / "step_20", layout.ACTOR))
    assert verdict.state == "weights_only"
    assert verdict.exportable and not verdict.ok and not verdict.resumable
    assert f"{layout.OPTIMIZER}: missing" in verdict.reasons


def test_damaged_weights_alone_are_rejected(run: RunDir, tmp_path: Path):
    folder = foreign(run, tmp_path / "elsewhere" / "step_20", layout.ACTOR)
    (folder / layout.ACTOR).write_bytes((folder / layout.ACTOR).read_bytes()[:-200])
    assert verify(folder).state == "rejected"


def test_trainer_state_alone_is_rejected(run: RunDir, tmp_path: Path):
    """C62: it counted as resumable elsewhere."""
    assert verify(foreign(run, tmp_path / "elsewhere" / "step_20", layout.TRAINER_STATE)).state == "rejected"


@pytest.mark.parametrize("text", ["{}", '{"global_step": "20"}', "[]", ""])
def test_foreign_folder_without_a_step_is_rejected(run: RunDir, tmp_path: Path, text: str):
    """C62: an empty trainer_state.json."""
    folder = foreign(run, tmp_path / "elsewhere" / "best", *layout.required_files())
    assert verify(folder).state == "unverified"
    (folder / layout.TRAINER_STATE).write_text(text)
    assert verify(folder).state == "rejected"
