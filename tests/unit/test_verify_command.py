"""`keepstep verify`: what it takes for a checkpoint's address, what it says, how it exits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint import layout
from keepstep.cli.main import main
from keepstep.run import RunDir
from tests.unit import builder

VERL = Path(__file__).parents[1] / "data" / "verl" / "fsdp2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = builder.run_in(tmp_path_factory.mktemp("verify-command"))
    for step in (20, 100):
        builder.write(run, step)
    run.latest_link.symlink_to("step_100")
    return run


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(finished.root, tmp_path / "run", symlinks=True)
    return RunDir.at(tmp_path / "run")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    capsys.readouterr()
    status = main(["verify", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def record(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out, _ = told(capsys, *arguments, "--json")
    return status, json.loads(out)


def test_a_good_one_says_step_epoch_speed_and_source(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, str(run.checkpoint(20)))
    assert (status, err) == (0, "")
    assert out.startswith(f"{run.checkpoint(20)}: verified (step 20, epoch 1, ")
    assert " GB/s, read from " in out
    status, found = record(capsys, str(run.checkpoint(20)))
    assert (status, found["state"], found["epoch"], found["quick"]) == (0, "verified", 1, False)
    assert found["read_from"] in ("disk", "page cache")


def test_a_quick_look_is_never_called_verified(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(capsys, str(run.checkpoint(20)), str(VERL / "global_step_4"), "--quick")
    assert status == 0
    assert "verified" not in out and "GB/s" not in out
    assert "sizes and headers agree (quick" in out and "structure is whole (quick" in out
    _, found = record(capsys, str(run.checkpoint(20)), "--quick")
    assert (found["quick"], found["read_from"]) == (True, None)


def test_verls_own_is_good_and_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """C68: exit 0 with the word `unverified`."""
    status, out, _ = told(capsys, str(VERL / "global_step_4"))
    assert status == 0
    first, second = out.splitlines()
    assert "unverified (step 4" in first and "without digests" in second


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_runs_folder_is_no_checkpoint(run: RunDir, flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = told(capsys, str(run.root), *flag)
    assert status == 2
    assert f"{run.root} is a run's folder" in err and f"keepstep verify {run.latest_link}" in err
    if flag:
        found = json.loads(out)
        assert found["path"] == str(run.root) and "is a run's folder" in found["error"] and "step_N" in found["remedy"]


def test_a_folder_of_steps_names_the_newest(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = told(capsys, str(run.checkpoints))
    assert status == 2 and f"keepstep verify {run.checkpoints}/step_100" in err
    status, _, err = told(capsys, str(VERL))
    assert status == 2 and f"keepstep verify {VERL}/global_step_4" in err


def test_an_unfinished_one_inside_a_run_is_bad(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """C62, C65."""
    (run.checkpoint(20) / layout.MANIFEST).unlink()
    assert told(capsys, str(run.checkpoint(20)))[0] == 1


@pytest.mark.parametrize("path", ["", "nowhere", "nowhere/checkpoints/step_20", "a\0b"])
def test_what_is_not_there(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = record(capsys, path)
    assert status == 2 and found["error"].endswith("does not exist.")


def test_many_paths_are_told_in_their_order(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is not there, one that is bad and good ones: each is told, the gravest decides."""
    (run.checkpoint(100) / layout.ACTOR).write_bytes(b"")
    paths = [str(run.checkpoint(20)), "nowhere", str(run.checkpoint(100)), str(VERL / "global_step_4")]
    status, found = record(capsys, *paths)
    assert status == 2
    assert [entry["path"] for entry in found] == paths
    assert [entry.get("state") for entry in found] == ["verified", None, "rejected", "unverified"]
    assert record(capsys, paths[0], paths[2])[0] == 1
    assert record(capsys, paths[0], paths[3])[0] == 0


@pytest.mark.parametrize("address", ["s3://bucket", "s3:///a/checkpoints/step_1"])
def test_an_address_of_no_checkpoint_is_told_as_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = record(capsys, address)
    assert status == 2 and "is no checkpoint's address" in found["error"]


def test_latest_as_link_as_copy_and_astray(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C92: a copied folder counts by its manifest's step; a link to elsewhere is not followed."""
    latest = str(run.latest_link)
    assert record(capsys, latest)[1]["step"] == 100
    run.latest_link.unlink()
    shutil.copytree(run.checkpoint(20), run.latest_link)
    assert record(capsys, latest)[1]["step"] == 20
    shutil.rmtree(run.latest_link)
    shutil.copytree(run.checkpoint(20), tmp_path / "step_20")
    run.latest_link.symlink_to(tmp_path / "step_20")
    assert record(capsys, latest)[0] == 1
    run.latest_link.unlink()
    run.latest_link.symlink_to("step_60")
    assert record(capsys, latest)[0] == 1
