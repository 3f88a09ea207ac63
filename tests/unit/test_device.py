"""What a device needs before anything starts: a compiler for torch.compile, as many GPUs as are asked for."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from keepstep.actor.environment import rank_environment
from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.errors import ConfigError
from keepstep.preflight import device
from keepstep.preflight.device import check_device, num_gpus, resolve_device

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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_compiler_of_a_rank_starts_no_processes_of_its_own(kind: str):
    """Nobody would record them, or end them with their rank."""
    assert rank_environment(kind)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(device, "_CUDA_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


ADDRESS = "ray.address=http://head:8265"


@pytest.mark.parametrize(
    ("settings", "here"),
    [(["trainer.device=cuda"], "cuda"), (["trainer.device=auto"], "cuda"), (["trainer.device=cpu"], "cpu")],
)
def test_with_a_driver_cuda_is_there(gpus: None, settings: list[str], here: str):
    assert resolve_device(load("quickstart", settings)) == here
    assert resolve_device(load("quickstart", [*settings, ADDRESS])) == here


def test_without_a_driver_cuda_is_only_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Flow and controller of a cluster stand where no GPU is; `auto` there would train on CPUs beside idle GPUs."""
    monkeypatch.setattr(device, "_CUDA_CONTROL", tmp_path / "nvidiactl")
    assert resolve_device(load("quickstart", ["trainer.device=auto"])) == "cpu"
    with pytest.raises(ConfigError, match="this machine has no CUDA driver"):
        resolve_device(load("quickstart", ["trainer.device=cuda"]))
    assert resolve_device(load("quickstart", ["trainer.device=cuda", ADDRESS])) == "cuda"
    assert resolve_device(load("quickstart", ["trainer.device=cpu", ADDRESS])) == "cpu"
    with pytest.raises(ConfigError, match=r"nodes of ray\.address may have some") as caught:
        resolve_device(load("quickstart", ["trainer.device=auto", ADDRESS]))
    assert "trainer.device=cuda or trainer.device=cpu" in caught.value.remedy


def test_a_compiler_is_needed_where_ranks_are(compiled: RunConfig):
    """On a cluster its nodes are asked, and this machine need not have one."""
    check_device(load("quickstart", [COMPILED, ADDRESS]))


APART = ["trainer.device=cuda", "actor_rollout_ref.hybrid_engine=false", "trainer.n_gpus_per_node=1"]


def test_engines_of_their_own_need_gpus_of_their_own(gpus: None, monkeypatch: pytest.MonkeyPatch):
    check_device(load("quickstart", APART))
    tensor_parallel = [*APART, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    check_device(load("quickstart", tensor_parallel))
    with pytest.raises(ConfigError, match=r"of their own, 1 \+ 2 \* 2, and this machine has 3\."):
        check_device(load("quickstart", [*tensor_parallel, "actor_rollout_ref.rollout.num_engines=2"]))
    # A cluster's GPUs are Ray's to count.
    check_device(load("quickstart", [
        *tensor_parallel, "actor_rollout_ref.rollout.num_engines=2", "ray.address=http://head:8265",
    ]))  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert num_gpus() == 1
    with pytest.raises(ConfigError, match="this machine has 1"):
        check_device(load("quickstart", APART))
