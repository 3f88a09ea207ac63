"""Staging: what a node needs of a checkpoint, on its own disk, compared on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint import layout, reader
from keepstep.checkpoint.manifest import parse
from keepstep.checkpoint.stage import clear, files_to_stage, stage, staged_run
from keepstep.checkpoint.verify import verify
from keepstep.errors import CheckpointError
from keepstep.run import RunDir
from tests.unit import builder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    return run


def test_a_full_checkpoint_is_staged_whole(run: RunDir, tmp_path: Path):
    copy = stage(run.checkpoint(20), str(tmp_path / "local"), "run-a", [1], 2)
    assert copy == staged_run(str(tmp_path / "local"), "run-a").checkpoint(20)
    assert verify(copy).resumable
    mine, other = (reader.read_role(run.checkpoint(20), reader.ACTOR, staged).tensors() for staged in (None, copy))
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_only_own_shards_unless_the_ranks_are_others(run: RunDir):
    whole = parse((run.checkpoint(20) / layout.MANIFEST).read_bytes())
    names = ["config.yaml", *(f"actor/model/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3))]
    manifest = replace(whole, files=dict.fromkeys(names, whole.files[layout.CONFIG]), world_size=3)
    assert files_to_stage(manifest, [0, 2], 3) == [names[0], names[1], names[3]]
    assert files_to_stage(manifest, [0], 4) == names


def test_what_is_read_wrong_is_not_loaded(run: RunDir, tmp_path: Path):
    """A network filesystem that gives other bytes to this node is noticed here."""
    path = run.checkpoint(20) / layout.OPTIMIZER
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt was read as \d+ bytes of another content"):
        stage(run.checkpoint(20), str(tmp_path / "local"), "run-a", [0], 1)


def test_stale_copies_go(run: RunDir, tmp_path: Path):
    """C47: a copy that a killed attempt left is removed by the next staging, and by the end of the loading."""
    local = str(tmp_path / "local")
    stage(run.checkpoint(20), local, "run-a", [0], 1)
    builder.write(run, 40)
    stage(run.checkpoint(40), local, "run-a", [0], 1)
    assert staged_run(local, "run-a").steps() == [40]
    clear(local, "run-a")
    assert staged_run(local, "run-a").steps() == []
