"""What a real shell completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
_shtab_keepstep
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str) -> str:
    command = [sys.executable, "-m", "keepstep.cli.main", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "keepstep.bash"
    path.write_text(script("bash"))
    return path


def completed(bash_script: Path, *words: str, folder: Path | None = None) -> list[str]:
    command = ["bash", "-c", COMPLETE, "bash", str(bash_script), "keepstep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    return done.stdout.split()


def test_commands_options_and_settings(bash_script: Path):
    assert completed(bash_script, "ver") == ["verify"]
    assert "--json" in completed(bash_script, "verify", "--")
    assert completed(bash_script, "run", "trainer.save") == ["trainer.save_freq"]
    assert set(completed(bash_script, "train", "actor_rollout_ref.actor.optim.l")) >= {
        "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.lr_warmup_steps",
    }  # fmt: skip
    assert completed(bash_script, "dataset", "ch") == ["check"]


def test_folders_of_runs_and_files_of_configurations(bash_script: Path, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "running.yaml").touch()
    assert completed(bash_script, "ls", "ru", folder=tmp_path) == ["runs"]
    assert "running.yaml" in completed(bash_script, "run", "--config", "ru", folder=tmp_path)


def test_zsh_takes_its_script(tmp_path: Path):
    text = script("zsh")
    assert text.startswith("#compdef keepstep") and "trainer.save_freq" in text
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    (tmp_path / "_keepstep").write_text(text)
    subprocess.run(["zsh", "-n", str(tmp_path / "_keepstep")], check=True, timeout=60)
