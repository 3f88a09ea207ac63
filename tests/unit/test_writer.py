"""Writing a checkpoint: content, atomicity, replays, the fence."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.publish import point
from keepstep.checkpoint.reader import ACTOR, OPTIMIZER, read_role
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import begin_sharded, temporary_folder
from keepstep.errors import ExactnessError, FencedError
from keepstep.run import read_json, write_json
from tests.unit import builder


def test_round_trip_joins_the_shards(tmp_path: Path):
    run = builder.run_in(tmp_path)
    assert builder.write(run, 20).outcome == "published"
    actor, optimizer = (read_role(run.checkpoint(20), role).tensors() for role in (ACTOR, OPTIMIZER))
    shards = builder.snapshots(20)
    for name, shape in builder.SHAPES.items():
        full = np.concatenate([shard.params[name] for shard in shards])
        assert full.shape == shape
        np.testing.assert_array_equal(actor[name].numpy(), full)
        np.testing.assert_array_equal(optimizer[f"state.{name}.exp_avg"].numpy(), full * 2)
    assert optimizer["state.norm.weight.step"].item() == 3.0
    assert len(read_json(run.checkpoint(20) / layout.TRAINER_STATE)["rng_states"]["per_rank"]) == 2


def test_what_is_written_verifies(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    verdict = verify(run.checkpoint(20), expected_run_id="run-a", expected_step=20)
    assert (verdict.state, verdict.reasons, verdict.step, verdict.epoch) == ("verified", [], 20, 1)


def test_manifest_lists_tensors_and_counts_non_finite_values(tmp_path: Path):
    run = builder.run_in(tmp_path)
    shards = builder.snapshots(1)
    shards[0].params["norm.weight"][0] = np.nan
    builder.save(builder.request(run, 20), shards, builder.references())
    manifest = parse((run.checkpoint(20) / layout.MANIFEST).read_bytes())
    assert ["norm.weight", "float32", [3]] in manifest.tensors[layout.ACTOR]
    assert manifest.nonfinite[layout.ACTOR] == 1
    assert manifest.nonfinite[layout.REF] == 0


def test_reference_is_stored_once_and_linked(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    builder.write(run, 40, reference_step=20)
    assert (run.checkpoint(20) / layout.REF).samefile(run.checkpoint(40) / layout.REF)
    assert verify(run.checkpoint(40)).resumable


def test_replayed_equal_keeps_the_standing_one(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    before = (run.checkpoint(20) / layout.MANIFEST).stat().st_ino
    assert builder.write(run, 20, attempt=2).outcome == "replayed_equal"
    assert (run.checkpoint(20) / layout.MANIFEST).stat().st_ino == before


def test_replay_with_other_bytes_stops_the_run(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    with pytest.raises(ExactnessError, match="Step 20 was trained again and differs"):
        builder.write(run, 20, seed=99)
    assert verify(run.checkpoint(20)).resumable


def test_replay_under_a_waiver_sets_the_old_one_aside(tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    result = builder.write(run, 20, seed=99, waive_exactness=True)
    assert result.outcome == "published"
    assert result.quarantined is not None and Path(result.quarantined).is_dir()
    assert verify(run.checkpoint(20)).resumable


def test_broken_standing_step_is_replaced_and_kept_aside(tmp_path: Path):
    """C152: an unfinished or damaged folder of the same step is never mixed with the new one."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    (run.checkpoint(20) / layout.OPTIMIZER).write_bytes(b"torn")
    result = builder.write(run, 20)
    assert result.quarantined is not None
    assert (Path(result.quarantined) / layout.OPTIMIZER).read_bytes() == b"torn"
    assert verify(run.checkpoint(20)).resumable


def test_stale_attempt_publishes_nothing(tmp_path: Path):
    run = builder.run_in(tmp_path)
    write_json(run.attempt(2), {"attempt": 2})
    with pytest.raises(FencedError):
        builder.write(run, 20, attempt=1)
    assert run.steps() == []


def test_leftover_of_a_killed_save_is_replaced(tmp_path: Path):
    """C34: a stale temporary folder of the same step does not hinder the next save."""
    run = builder.run_in(tmp_path)
    stale = run.checkpoints / ".tmp-step_20-attempt_1" / "actor"
    stale.mkdir(parents=True)
    (stale / "pytorch_model.bin").write_bytes(b"half")
    builder.write(run, 20)
    assert verify(run.checkpoint(20)).resumable


def test_files_load_with_weights_only(tmp_path: Path):
    """C110: nothing in a checkpoint needs more than torch's safe loading."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    for name in layout.TENSOR_FILES:
        torch.load(run.checkpoint(20) / name, weights_only=True)


def test_latest_is_a_relative_link_and_a_text(tmp_path: Path):
    """C89, C92: the link survives a move of the run, and a plain text says the same."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    point(run.latest_link, run, 20, lambda: None)
    moved = run.root.rename(tmp_path / "moved")
    assert verify(moved / "checkpoints" / "latest").step == 20
    assert (moved / "checkpoints" / "latest.txt").read_text() == "step_20\n"


def test_one_writer_makes_the_folders_of_all(tmp_path: Path):
    """C22, C23: before any rank's writer begins, by one process."""
    run = builder.run_in(tmp_path)
    request = builder.request(run, 20, layout=layout.SHARDED)
    begin_sharded(request, builder.snapshots(20)[0], builder.references())
    folder = temporary_folder(request)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "actor", "actor/model", "actor/optimizer", "ref", "ref/model",
    ]  # fmt: skip


def test_tokenizer_is_written_by_one(tmp_path: Path):
    """C31: the writer alone writes what all ranks have in common."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    assert [path.name for path in (run.checkpoint(20) / layout.TOKENIZER_DIR).iterdir()] == ["config.json"]


def test_trainer_state_is_plain_json(tmp_path: Path):
    """C41: the random streams of all ranks stand in one file that one process writes."""
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    state = json.loads((run.checkpoint(20) / layout.TRAINER_STATE).read_text())
    assert state["global_step"] == 20
    assert len(state["rng_states"]["per_rank"]) == 2
    assert set(state["rng_states"]) == {"python", "numpy", "torch", "cuda", "per_rank"}
