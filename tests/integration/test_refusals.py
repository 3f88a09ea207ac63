"""Bad input: one clear message that names the thing and the way out, the documented exit code, nothing written."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from keepstep.quickstart import arithmetic
from tests.integration.driver import Driver, clean_environment

pytestmark = pytest.mark.integration


def keepstep(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", *arguments],
        capture_output=True, text=True, timeout=120, cwd=cwd, env=clean_environment() | environment,
    )  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder with its time and content."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    arithmetic.write(folder)
    return folder


def refused(done: subprocess.CompletedProcess[str], status: int, *texts: str) -> None:
    assert done.returncode == status, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr


def train(output: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return keepstep("train", f"trainer.output_dir={output}", "s3.embedded=false", *overrides, **environment)


@pytest.mark.parametrize(
    ("overrides", "status", "texts"),
    [
        (["trainer.save_frq=5"], 2, ["trainer.save_frq", "trainer.save_freq"]),
        (["trainer.save_freq=0"], 2, ["trainer.save_freq"]),
        (["algorithm.adv_estimator=gae"], 2, ["algorithm.adv_estimator", "grpo", "gae"]),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=3"], 2, ["tensor_model_parallel_size=3", "heads 4"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=48"], 2, ["data.train_batch_size", "64", "48"]),
        (["data.train_files=/nowhere/train.parquet"], 4, ["/nowhere/train.parquet", "does not exist"]),
        (["data.train_files=/nowhere/*.parquet"], 4, ["/nowhere/*.parquet"]),
        (["actor_rollout_ref.model.path=/nowhere/model"], 2, ["/nowhere/model"]),
        (["custom_reward_function.name=no.such.function"], 2, ["no.such.function"]),
        (["trainer.resume_from_checkpoint=/nowhere/step_20"], 1, ["/nowhere/step_20"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else str(value),
)
def test_bad_settings(tmp_path: Path, overrides: list[str], status: int, texts: list[str]):
    """C28, C40: refused before a rank or an engine starts."""
    refused(train(tmp_path / "run", *overrides), status, *texts)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_empty_truncated_and_foreign_parquet(tmp_path: Path, data: Path):
    """C17, C19: named with what is wrong."""
    empty, truncated, foreign = (tmp_path / f"{name}.parquet" for name in ("empty", "truncated", "foreign"))
    empty.touch()
    truncated.write_bytes((data / "train.parquet").read_bytes()[:-64])
    foreign.write_text("a,b\n1,2\n" * 50)
    for path, text in ((empty, "is 0 bytes"), (truncated, "is truncated"), (foreign, "is not parquet")):
        refused(train(tmp_path / "run", f"data.train_files={path}"), 4, str(path), text)
    assert not (tmp_path / "run").exists()


def test_missing_column_is_named(tmp_path: Path):
    path = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["1+1="], "data_source": ["x"]}), path)
    refused(train(tmp_path / "run", f"data.train_files={path}"), 4, str(path), "prompt", "question")


def test_folder_of_something_else_is_refused_and_untouched(tmp_path: Path):
    """C53, C118: what is there is not ours."""
    (tmp_path / "run" / "checkpoints" / "step_5").mkdir(parents=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = snapshot(tmp_path / "run")
    refused(train(tmp_path / "run"), 3, str(tmp_path / "run"), "run.json")
    assert snapshot(tmp_path / "run") == before


@pytest.fixture
def finished(reference: Driver, workspace: Path) -> Path:
    """A copy of the reference run that may be spoiled; the made model and data are beside it."""
    folder = workspace / "spoiled"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(reference.run.root, folder, symlinks=True)
    (folder / "result.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("override", "status", "texts"),
    [
        ("actor_rollout_ref.rollout.n=4", 3, ["actor_rollout_ref.rollout.n", "8", "4"]),
        ("trainer.seed=7", 3, ["trainer.seed", "42", "7"]),
        ("actor_rollout_ref.actor.optim.lr=1e-5", 3, ["actor_rollout_ref.actor.optim.lr", "0.0005", "1e-05"]),
        ("trainer.total_training_steps=60", 3, ["trainer.total_training_steps", "44", "60", "resume.allow"]),
        ("trainer.n_gpus_per_node=1", 3, ["trainer.n_gpus_per_node", "resume.allow"]),
    ],
)
def test_drift_is_refused_and_nothing_is_written(finished: Path, override: str, status: int, texts: list[str]):
    """C113, C118: the message has field, then and now; the run's folder is unchanged to the byte."""
    before = snapshot(finished)
    refused(train(finished, "trainer.total_training_steps=44", "trainer.save_freq=5", override), status, *texts)
    assert snapshot(finished) == before


def test_other_data_is_refused_with_both_counts(finished: Path, data: Path, tmp_path: Path):
    """C2, C16: another number of rows, and the same number of rows with other content."""
    table = pyarrow.parquet.read_table(data / "train.parquet")
    fewer, other = tmp_path / "fewer.parquet", tmp_path / "other.parquet"
    pyarrow.parquet.write_table(table.slice(0, 600), fewer)
    pyarrow.parquet.write_table(table.take(list(reversed(range(640)))), other)
    before = snapshot(finished)
    common = ["trainer.total_training_steps=44", "trainer.save_freq=5"]
    refused(train(finished, *common, f"data.train_files={fewer}"), 4, str(fewer), "640 rows expected, 600 found")
    refused(train(finished, *common, f"data.train_files={other}"), 4, str(other), "expected", "found")
    assert snapshot(finished) == before


def test_complete_run_with_another_setting_is_refused_all_the_same(finished: Path, reference: Driver):
    """ "Complete" is an answer to the same start only."""
    shutil.copyfile(reference.run.result, finished / "result.json")
    before = snapshot(finished)
    common = ["trainer.total_training_steps=44", "trainer.save_freq=5"]
    refused(train(finished, *common, "trainer.seed=7"), 3, "trainer.seed", "42", "7")
    assert snapshot(finished) == before


def test_port_in_use_names_its_holder(tmp_path: Path, workspace: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = train(workspace / "port", f"actor_rollout_ref.rollout.port={port}")
    refused(done, 2, f"actor_rollout_ref.rollout.port: port {port} is in use by process {os.getpid()}")
    assert not (workspace / "port" / "checkpoints").exists()


def test_closed_store_is_named_before_anything_starts(tmp_path: Path):
    """A bucket that is not reachable stops a first start: whether the store holds the run cannot be known."""
    done = keepstep(
        "train", f"trainer.output_dir={tmp_path / 'run'}", "s3.embedded=false", "s3.bucket=some-bucket",
        "s3.endpoint_url=http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="very-secret-value",
    )  # fmt: skip
    refused(done, 6, "some-bucket")
    assert "very-secret-value" not in done.stderr + done.stdout
    assert not (tmp_path / "run").exists()


def test_full_disk_is_named(tmp_path: Path):
    """C43: no room is said before a rank starts."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        done = train(mount / "run", f"data.train_files={os.devnull}")
        refused(done, 1, "MiB free", "Free space")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_quickstart_needs_no_settings_to_explain_itself(tmp_path: Path):
    done = keepstep("run", "--dry-run", "trainer.save_freq=7", cwd=tmp_path)
    assert done.returncode == 0
    assert "save_freq: 7" in done.stdout
    assert list(tmp_path.iterdir()) == []
