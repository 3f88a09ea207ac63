"""What a device needs before anything starts: a compiler for torch.compile."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from keepstep.actor.environment import rank_environment
from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError
from keepstep.preflight.device import check_device

COMPILED = "actor_rollout_ref.actor.use_torch_compile=true"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A configuration that compiles, on a machine whose PATH and headers are `tmp_path`, empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return load("quickstart", [COMPILED])


def executable(path: Path) -> None:
    path.touch()
    path.chmod(0o755)


def test_without_a_compiler_a_start_is_refused(compiled: RunConfig):
    with pytest.raises(ConfigError, match=r"there is no g\+\+ here") as caught:
        check_device(compiled)
    assert "apt-get install g++" in caught.value.remedy and "CXX" in caught.value.remedy


def test_without_the_headers_of_python_a_start_is_refused(compiled: RunConfig, tmp_path: Path):
    executable(tmp_path / "g++")
    with pytest.raises(ConfigError, match=r"there is no .*/Python\.h here"):
        check_device(compiled)
    (tmp_path / "Python.h").touch()
    check_device(compiled)


def test_another_compiler_may_be_named(compiled: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CXX", "clang++-19")
    with pytest.raises(ConfigError, match=r"there is no clang\+\+-19 here"):
        check_device(compiled)
    executable(tmp_path / "clang++-19")
    check_device(compiled)


def test_who_does_not_compile_needs_no_compiler(compiled: RunConfig):
    check_device(load("quickstart"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_compiler_of_a_rank_starts_no_processes_of_its_own(device: str):
    """Nobody would record them, or end them with their rank."""
    assert rank_environment(device)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
