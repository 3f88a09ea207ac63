"""verl's checkpoints, made by its own checkpoint manager (tests/data/verl), and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.verify import Verdict, verify

DATA = Path(__file__).parents[1] / "data" / "verl"
STEP = "global_step_4"


@pytest.fixture(params=["fsdp1", "fsdp2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(DATA / request.param, tmp_path / "run")
    return tmp_path / "run" / STEP


@pytest.fixture
def one(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "fsdp2", tmp_path / "run")
    return tmp_path / "run" / STEP


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def rejected_by(verdict: Verdict, name: str) -> str:
    """The first reason, which must name this file."""
    assert verdict.state in ("rejected", "weights_only") and not verdict.ok
    assert verdict.reasons[0].startswith(f"{name}: "), verdict.reasons
    return verdict.reasons[0]


def test_a_whole_one_is_unverified_and_says_what_that_means(folder: Path):
    """C68: another tool's good checkpoint is told apart from a broken one."""
    verdict = verify(folder)
    assert (verdict.state, verdict.ok, verdict.resumable, verdict.step) == ("unverified", True, False, 4)
    (note,) = verdict.notes
    assert "2 ranks of extra_state, model, optim" in note and "without digests" in note and "CRC-32" in note
    assert "was not read" in verify(folder, quick=True).notes[0]


def test_the_part_of_the_policy_alone_has_weights(folder: Path):
    verdict = verify(folder / "actor")
    assert (verdict.state, verdict.step) == ("weights_only", 4)
    assert verdict.reasons == ["data.pt: missing: nothing says which row comes next"]


def test_ranks_are_counted_by_the_names_of_the_files(folder: Path):
    """C70, C178: 2 ranks whatever this machine has, and without fsdp_config.json too; 16 when the names say 16."""
    (folder / "actor" / "fsdp_config.json").unlink()
    assert verify(folder).state == "unverified"
    for path in list((folder / "actor").glob("*_world_size_2_*")):
        path.rename(path.with_name(path.name.replace("world_size_2", "world_size_16")))
    verdict = verify(folder)
    assert verdict.reasons[0] == "actor/extra_state_world_size_16_rank_2.pt: missing, one of 14 of 16 ranks"


def test_fsdp_config_of_another_world_size(one: Path):
    (one / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    assert "world_size 8, the rank files are of 2" in rejected_by(verify(one), "actor/fsdp_config.json")


def test_a_huge_world_size_is_answered_at_once(one: Path):
    (one / "actor" / "model_world_size_2_rank_1.pt").unlink()
    (one / "actor" / "model_world_size_2_rank_0.pt").unlink()
    shutil.copy(one / "actor" / "optim_world_size_2_rank_0.pt", one / "actor" / "model_world_size_9000000_rank_0.pt")
    assert verify(one).reasons[0] == "actor: holds files of world sizes 2 and 9000000: two saves in one folder"


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(one: Path, kind: str, rank: int):
    """C70, C74."""
    name = f"actor/{kind}_world_size_2_rank_{rank}.pt"
    (one / name).unlink()
    assert "missing, one of 1 of 2 ranks" in rejected_by(verify(one), name)


def test_missing_kinds_leave_weights_or_nothing(one: Path):
    """C5: an export can be made of it, a resume cannot; C4: without the loader's state too."""
    (one / "data.pt").unlink()
    assert "nothing says which row comes next" in rejected_by(verify(one), "data.pt")
    for path in (one / "actor").glob("optim_*"):
        path.unlink()
    verdict = verify(one)
    assert verdict.state == "weights_only" and any("optim was not saved" in reason for reason in verdict.reasons)
    for path in (one / "actor").glob("model_*"):
        path.unlink()
    assert verify(one).state == "rejected"


def test_every_truncation_and_every_flip_of_content_is_seen(folder: Path):
    """C61, C74: by the archive's end, its directory, or the CRC-32 of its records."""
    names = [name for name in files_of(folder) if name.endswith(".pt")]
    for name in names:
        original = (folder / name).read_bytes()
        for length in (0, 1, len(original) // 2, len(original) - 1):
            (folder / name).write_bytes(original[:length])
            rejected_by(verify(folder, quick=True), name)
        (folder / name).write_bytes(original)
        with zipfile.ZipFile(folder / name) as archive:
            places = {info.filename: info.header_offset + 200 for info in archive.infolist() if info.file_size > 400}
        for record, position in places.items():
            damaged = bytearray(original)
            damaged[position] ^= 1
            (folder / name).write_bytes(damaged)
            assert name in verify(folder).reasons[0], record
        (folder / name).write_bytes(original)
    assert verify(folder).ok


def test_files_under_each_others_names_are_seen(one: Path):
    first, second = (one / "actor" / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert "was saved as model_world_size_2_rank_1" in rejected_by(verify(one), f"actor/{first.name}")


def test_a_pickle_with_another_global_is_named_and_not_executed(one: Path, tmp_path: Path):
    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (os.system, (f"touch {marker}",))

    torch.save({"a": Hostile()}, one / "actor" / "extra_state_world_size_2_rank_1.pt")
    reason = rejected_by(verify(one), "actor/extra_state_world_size_2_rank_1.pt")
    assert "asks for posix.system, which would run code" in reason
    assert not marker.exists()


def test_getattr_reaches_nothing(one: Path):
    """A ShardedTensor's pickle calls getattr for one class of its own; of anything else it would reach code."""
    name = "extra_state_world_size_2_rank_0"
    data = pickle.dumps({}, protocol=2)[:-1] + b"c__builtin__\ngetattr\n(cnumpy\nndarray\nX\x04\x00\x00\x00dumptR0."
    with zipfile.ZipFile(one / "actor" / f"{name}.pt", "w") as archive:
        archive.writestr(f"{name}/data.pkl", data)
    assert "a call of getattr, which would run code" in rejected_by(verify(one), f"actor/{name}.pt")


def test_an_index_that_names_a_file_outside(one: Path):
    """C62 (c)."""
    index = one / "actor" / "huggingface" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../model_world_size_2_rank_0.pt"}}))
    name = "actor/huggingface/model.safetensors.index.json"
    assert "which is no file beside it" in rejected_by(verify(one), name)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "names model-00001-of-00002.safetensors, which is missing" in rejected_by(verify(one), name)


def test_the_tracker_is_a_hint(folder: Path):
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("8")
    verdict = verify(folder)
    assert verdict.ok and verdict.notes[1] == "latest_checkpointed_iteration.txt beside it names '8'"


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """The older layout of verl's guides, each part as torch.save writes it."""
    folder = tmp_path / "checkpoint"
    for name in ("actor_model", "critic_model", "optimizer", "scheduler"):
        (folder / name).mkdir(parents=True)
        torch.save({"weight": torch.ones(3)}, folder / name / f"{name}.pt")
    (folder / "training_state.json").write_text(json.dumps({"global_step": 30, "epoch": 1}))
    (folder / "config.yaml").write_text("a: 1\n")
    return folder


def test_the_older_layout(guide: Path):
    verdict = verify(guide)
    assert (verdict.state, verdict.step, verdict.resumable) == ("unverified", 30, False)
    assert "older layout" in verdict.notes[0]
    shutil.rmtree(guide / "critic_model")
    assert verify(guide).ok
    shutil.rmtree(guide / "optimizer")
    assert (verify(guide).state, verify(guide).reasons) == ("weights_only", ["optimizer: missing"])
    (guide / "actor_model" / "actor_model.pt").unlink()
    assert verify(guide).state == "rejected"


@pytest.mark.parametrize("text", ["{}", '{"global_step": "30"}', "[]", "", '{"global_step": NaN}'])
def test_the_older_layout_without_a_step(guide: Path, text: str):
    (guide / "training_state.json").write_text(text)
    rejected_by(verify(guide), "training_state.json")


def test_the_older_layout_damaged(guide: Path):
    path = guide / "scheduler" / "scheduler.pt"
    path.write_bytes(path.read_bytes()[:-1])
    rejected_by(verify(guide), "scheduler/scheduler.pt")
