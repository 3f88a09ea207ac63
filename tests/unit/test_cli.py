"""The command line: what it understands, what it prints, how it exits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

import keepstep
from keepstep.checkpoint import layout
from keepstep.cli.main import main
from keepstep.config.load import load, to_yaml
from keepstep.data import record
from keepstep.data.count import count_rows
from keepstep.errors import EXIT_DATA, EXIT_FAILED, EXIT_USAGE
from keepstep.run import PLATFORM_DIR, RunDir, write_atomic, write_json
from tests.unit import builder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with steps 20, 100 and 140; `copy` gives a test its own."""
    run = builder.run_in(tmp_path_factory.mktemp("cli"))
    for step in (20, 100, 140):
        builder.write(run, step)
    data = run.root.parent / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [str(number) for number in range(30)]}), data)
    write_json(run.record, {"run_id": "run-a", "dataset": record.build(count_rows([str(data)]), [])})
    write_atomic(run.config, to_yaml(load(None, [f"trainer.output_dir={run.root}"])).encode())
    run.latest_link.symlink_to("step_140")
    run.text_of(run.latest_link).write_text("step_140\n")
    return run


@pytest.fixture
def copy(finished: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(finished.root.parent, tmp_path / "copy", symlinks=True)
    return RunDir.at(tmp_path / "copy" / finished.root.name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """(exit code, JSON on standard output, standard error)."""
    capsys.readouterr()
    status = main([*arguments, "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out), printed.err


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == EXIT_USAGE
    return capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"keepstep {keepstep.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["verify"], ["download", "run"], ["ls"], ["verify", "p", "--qick"]]
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "usage: keepstep" in usage_error(capsys, *arguments)


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--qui" in usage_error(capsys, "verify", "path", "--qui")
    assert main(["train", "--dry", "--config", "quickstart"]) == EXIT_USAGE


# verify


def test_page_of_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PLATFORM_DIR).mkdir()
    assert main(["ui", str(tmp_path / "nosuch")]) == EXIT_USAGE
    assert "no run was started here or beside it" in capsys.readouterr().err


def test_verify_a_good_one(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = answer(capsys, "verify", str(finished.checkpoint(20)))
    assert (status, found["state"], found["step"], found["reasons"]) == (0, "verified", 20, [])
    assert main(["verify", str(finished.checkpoint(20)), "--quick"]) == 0
    assert "sizes and headers agree (quick: the content was not read) (step 20" in capsys.readouterr().out


def test_verify_latest_as_link_and_as_copy(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """C92: stores and archives have no links."""
    status, found, _ = answer(capsys, "verify", str(copy.latest_link))
    assert (status, found["step"]) == (0, 140)
    copy.latest_link.unlink()
    shutil.copytree(copy.checkpoint(100), copy.latest_link)
    status, found, _ = answer(capsys, "verify", str(copy.latest_link))
    assert (status, found["step"]) == (0, 100)


def test_verify_a_bad_one(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy.checkpoint(100) / layout.OPTIMIZER)
    status, found, _ = answer(capsys, "verify", str(copy.checkpoint(100)))
    assert (status, found["state"]) == (EXIT_FAILED, "rejected")
    assert found["reasons"][0].startswith("actor/optimizer.pt: part 0 has SHA-256 ")
    assert main(["verify", str(copy.checkpoint(100))]) == EXIT_FAILED
    printed = capsys.readouterr()
    assert printed.out == "" and "actor/optimizer.pt" in printed.err
    assert main(["verify", str(copy.checkpoint(100)), "--quick"]) == 0


def test_verify_several(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy.checkpoint(100) / layout.ACTOR)
    paths = [str(copy.checkpoint(step)) for step in (20, 100, 140)]
    status, found, _ = answer(capsys, "verify", *paths)
    assert status == EXIT_FAILED
    assert [(entry["step"], entry["state"]) for entry in found] == [
        (20, "verified"),
        (100, "rejected"),
        (140, "verified"),
    ]


def test_verify_what_is_not_there(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(copy.checkpoint(60))
    assert main(["verify", missing]) == EXIT_USAGE
    assert capsys.readouterr().err == f"keepstep: {missing} does not exist.\n"
    flip(copy.checkpoint(100) / layout.ACTOR)
    assert main(["verify", missing, str(copy.checkpoint(100))]) == EXIT_USAGE
    assert main(["verify", str(copy.checkpoint(100)), missing]) == EXIT_USAGE


@pytest.mark.parametrize(
    "address",
    ["s3://bucket", "s3://bucket/run/step_20", "s3://bucket/checkpoints/step_x", "s3:///a/checkpoints/step_1"],
)
def test_verify_an_address_of_no_checkpoint(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", address]) == EXIT_USAGE
    assert f"{address} is no checkpoint's address" in capsys.readouterr().err


# ls and plan


def test_ls(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    copy.quarantine.joinpath("step_60.failed-verification.1").mkdir(parents=True)
    write_json(copy.upload(100), {"step": 100})
    write_json(copy.upload(200), {"step": 200})
    copy.events.write_text(json.dumps({"event": "checkpoint_verified", "step": 100, "attempt": 1}) + "\n")
    status, found, _ = answer(capsys, "ls", str(copy.root))
    assert status == 0
    assert found["quarantine"] == ["step_60.failed-verification.1"]
    columns = ("step", "on_disk", "verified", "uploaded", "latest")
    assert [tuple(row[column] for column in columns) for row in found["checkpoints"]] == [
        (20, True, False, False, False),
        (100, True, True, True, False),
        (140, True, False, False, True),
        (200, False, False, True, False),
    ]


def test_plan_heeds_the_settings_of_the_run(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    written = copy.config.read_text()
    assert "policy: prefer_multiple" in written
    copy.config.write_text(written.replace("policy: prefer_multiple", "policy: latest"))
    assert answer(capsys, "plan", str(copy.root))[1]["step"] == 140
    copy.config.write_text(written.replace("policy: prefer_multiple", "polcy: latest"))
    status = main(["plan", str(copy.root)])
    assert status == 2 and "polcy" in capsys.readouterr().err


def test_plan(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = answer(capsys, "plan", str(copy.root))
    assert (status, found["step"], found["newest"], found["steps_given_up"]) == (0, 100, 140, 40)
    flip(copy.checkpoint(100) / layout.SCHEDULER)
    status, found, _ = answer(capsys, "plan", str(copy.root))
    assert (status, found["step"], [entry["step"] for entry in found["rejections"]]) == (0, 140, [100])
    assert main(["plan", str(copy.root)]) == 0
    printed = capsys.readouterr().out
    assert "step 100 (local) rejected: actor/scheduler.pt" in printed and "resumes at step 140" in printed


def test_plan_knows_what_the_store_confirmed(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """C68, C76: with every local folder gone the answer is the store's step, never step 0."""
    write_json(copy.upload(100), {"step": 100})
    shutil.rmtree(copy.checkpoints)
    status, found, _ = answer(capsys, "plan", str(copy.root))
    assert (status, found["step"], found["source"]) == (0, 100, "s3")


def test_plan_without_a_usable_one(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """C68, C76."""
    for step in (20, 100, 140):
        (copy.checkpoint(step) / layout.MANIFEST).unlink()
    assert main(["plan", str(copy.root)]) == EXIT_FAILED
    text = capsys.readouterr().err
    assert "none can be resumed from" in text and "Traceback" not in text
    for step in (20, 100, 140):
        assert f"step {step} (local)" in text


@pytest.mark.parametrize("command", ["ls", "plan"])
def test_a_folder_that_is_no_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == EXIT_USAGE
    assert f"{tmp_path} is not the folder of a run" in capsys.readouterr().err
    assert main([command, str(tmp_path / "typo")]) == EXIT_USAGE
    assert "is not the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["ls"], "it has no run.json"),
        (["doctor"], "it has no run.json and no attempts"),
        (["report"], "it has no run.json and no attempts"),
        (["upload"], "run.json and config.yaml are not both there"),
    ],
)
def test_a_folder_that_holds_runs_names_them(
    command: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text("{}")
    assert main([*command, str(tmp_path)]) == EXIT_USAGE
    assert f"{why}.\n  Runs in it: mine." in capsys.readouterr().err
    assert main([*command, str(tmp_path / "typo")]) == EXIT_USAGE
    assert "typo is not the folder of a run: it does not exist." in capsys.readouterr().err


# dataset check


def test_dataset_check_against_a_number(finished: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(finished.root.parent / "train.parquet")
    status, found, _ = answer(capsys, "dataset", "check", data, "--expect-rows", "30")
    assert (status, found["num_rows"], found["expected"], found["problems"]) == (0, 30, 30, [])
    status, found, _ = answer(capsys, "dataset", "check", data, "--expect-rows", "31", "--deep")
    assert (status, found["problems"]) == (EXIT_DATA, [f"{data}: 30 rows, expected 31"])
    assert main(["dataset", "check", data]) == 0


def test_dataset_check_against_a_run(copy: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """C2."""
    data = copy.root.parent / "train.parquet"
    assert main(["dataset", "check", str(data), "--run", str(copy.root)]) == 0
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 20}), data)
    status, found, _ = answer(capsys, "dataset", "check", str(data), "--run", str(copy.root))
    assert status == EXIT_DATA
    (problem,) = found["problems"]
    assert str(data) in problem and "30 rows expected, 20 found" in problem


def test_dataset_check_against_a_log(finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, log = str(finished.root.parent / "train.parquet"), tmp_path / "train.log"
    log.write_text("a\n2025-01-01 INFO Loaded train dataset: 30 rows\nTrain dataset after filtering: 7 rows\n")
    assert main(["dataset", "check", data, "--log", str(log)]) == 0
    log.write_text("2025-01-01 INFO Loaded train dataset: 7473 rows\n")
    status, found, _ = answer(capsys, "dataset", "check", data, "--log", str(log))
    assert (status, found["expected"]) == (EXIT_DATA, 7473)
    log.write_text("nothing\n")
    assert main(["dataset", "check", data, "--log", str(log)]) == EXIT_USAGE


def test_dataset_check_of_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C17."""
    path = tmp_path / "train.parquet"
    path.touch()
    assert main(["dataset", "check", str(path)]) == EXIT_DATA
    assert f"{path} is 0 bytes" in capsys.readouterr().err


# run and train


@pytest.mark.parametrize("command", ["run", "train"])
def test_dry_run_prints_the_resolved_config(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "trainer.save_freq=5", "--dry-run", "--config", "quickstart", "data.shuffle=false"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["save_freq"] == 5
    assert printed["data"]["shuffle"] is False
    assert printed == load("quickstart", ["trainer.save_freq=5", "data.shuffle=false"]).model_dump(mode="json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--seed", "7"], "trainer.seed", 7),
        (["--seed=7"], "trainer.seed", 7),
        (["--s3-bucket", "mine"], "s3.bucket", "mine"),
        (["--s3-prefix", "a/b"], "s3.prefix", "a/b"),
        (["--s3-upload-interval", "40"], "s3.upload_interval", 40),
        (["--resume_from_checkpoint", "c/step_20"], "trainer.resume_from_checkpoint", "c/step_20"),
        (["--no-rollout-state-restore"], "trainer.seed", 42),
        (["--trainer.seed=9"], "trainer.seed", 9),
        (["+trainer.seed=9"], "trainer.seed", 9),
        (["--seed", "7", "trainer.seed=8"], "trainer.seed", 8),
    ],
)
def test_flags_of_other_trainers_guides(
    flags: list[str], key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", *flags]) == 0
    section, name = key.split(".")
    assert yaml.safe_load(capsys.readouterr().out)[section][name] == value


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trainer.sead=1"], "the nearest is trainer.seed"),
        (["--sead", "1"], "--sead: not understood"),
        (["--seed", "many"], "trainer.seed='many'"),
        (["--config", "no.yaml"], "--config no.yaml: no such file"),
        (["--s3-upload-interval", "0"], "s3.upload_interval=0"),
        (["--dry-run", "data.train_batch_size=60"], "ppo_mini_batch_size=32"),
        (["--dry-run", "s3.endpoint_url=https://name:hidden@store"], "s3.endpoint_url carries credentials"),
    ],
)
@pytest.mark.parametrize("command", ["run", "train"])
def test_refusals(command: str, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *arguments]) == EXIT_USAGE
    printed = capsys.readouterr()
    assert part in printed.err and printed.out == ""
    assert "hidden" not in printed.err


def test_warnings_are_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "trainer.save_freq=30"]) == 0
    assert "trainer.save_freq=30 does not divide resume.prefer_multiple=100" in capsys.readouterr().err


def test_as_a_process() -> None:
    """The module and its exit code, with nothing but the message on standard error."""
    command = [sys.executable, "-m", "keepstep.cli.main", "train", "trainer.sead=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("keepstep: Unknown settings:") and "Traceback" not in done.stderr
