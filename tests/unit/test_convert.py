"""Both layouts hold the same, and convert into each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint import layout, reader
from keepstep.checkpoint.convert import convert
from keepstep.checkpoint.verify import verify
from keepstep.cli.main import main
from keepstep.errors import CheckpointError, ConfigError
from keepstep.run import RunDir
from tests.unit import builder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = builder.run_in(tmp_path_factory.mktemp("convert"))
    builder.write(run, 20)
    return run


def same(first: Path, second: Path) -> bool:
    for role in (reader.ACTOR, reader.OPTIMIZER, reader.REF):
        mine, other = (reader.read_role(folder, role).tensors() for folder in (first, second))
        if mine.keys() != other.keys() or not all(torch.equal(mine[name], other[name]) for name in mine):
            return False
    return reader.read_param_groups(first) == reader.read_param_groups(second)


def test_there_and_back(run: RunDir, tmp_path: Path):
    source = run.checkpoint(20)
    sharded = convert(source, tmp_path / "sharded" / "step_20", layout.SHARDED)
    verdict = verify(sharded, expected_run_id="run-a", expected_step=20)
    assert (verdict.state, verdict.reasons) == ("verified", [])
    assert verdict.manifest is not None and verdict.manifest.layout == layout.SHARDED
    assert same(source, sharded)
    back = convert(sharded, tmp_path / "full" / "step_20", layout.FULL)
    assert verify(back).resumable and same(source, back)
    names = [layout.ACTOR, layout.SCHEDULER, layout.REF, layout.TRAINER_STATE]
    assert [(back / name).read_bytes() == (source / name).read_bytes() for name in names] == [True] * 4


def test_nothing_is_left_of_one_that_fails(run: RunDir, tmp_path: Path):
    with pytest.raises(ConfigError, match="exists"):
        convert(run.checkpoint(20), tmp_path, layout.SHARDED)
    broken = convert(run.checkpoint(20), tmp_path / "step_20", layout.FULL)
    (broken / layout.OPTIMIZER).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        convert(broken, tmp_path / "out" / "step_20", layout.SHARDED)
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_command(run: RunDir, tmp_path: Path, capsys):
    target = tmp_path / "step_20"
    assert main(["convert", str(run.checkpoint(20)), str(target), "--layout", "sharded"]) == 0
    assert "in layout sharded, verified" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "nothing"), str(target), "--layout", "full"]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [layout.FULL, layout.SHARDED])
def test_one_without_what_may_be_deleted(run: RunDir, tmp_path: Path, kind: str):
    """The engine's own state is informative: without it a checkpoint is as good, also to convert."""
    source = tmp_path / "source" / "step_20"
    shutil.copytree(run.checkpoint(20), source)
    assert (source / layout.ROLLOUT_DIR).is_dir()
    shutil.rmtree(source / layout.ROLLOUT_DIR)
    converted = convert(source, tmp_path / "target" / "step_20", kind)
    verdict = verify(converted)
    assert (verdict.state, verdict.reasons) == ("verified", [])
    assert same(source, converted) and not (converted / layout.ROLLOUT_DIR).exists()
