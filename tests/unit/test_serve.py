"""`keepstep serve`: what becomes of its arguments, and that a checkpoint is exported once."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import serve_command
from keepstep.cli.serve_command import environment, exported, is_model, served_name, server_command
from keepstep.errors import ConfigError
from keepstep.export.origin import identity
from keepstep.run import write_json

VERL = Path(__file__).parents[1] / "data" / "verl" / "fsdp2" / "global_step_4"


def make_model(folder: Path, made_of: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    if made_of is not None:
        write_json(folder / "keepstep_export.json", {"checkpoint": made_of})
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Nothing but what tells whose export is whose."""
    folder = tmp_path / "mine" / "checkpoints" / "step_20"
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {"self": "abc"})
    return folder


def test_what_is_given_reaches_vllm_and_what_is_passed_on_wins():
    options = {"--port": 8001, "--tensor-parallel-size": None, "--gpu-memory-utilization": 0.5}
    command = server_command(Path("/runs/mine/export/step_20"), options, ["--port", "9"], "cuda")
    assert command == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/runs/mine/export/step_20",
        "--served-model-name", "mine-step_20", "--port", "8001", "--gpu-memory-utilization", "0.5", "--port", "9",
    ]  # fmt: skip


def test_on_a_cpu_a_seeded_request_must_not_crash_the_engine():
    command = server_command(Path("/out"), {}, [], "cpu")
    assert command[-2:] == ["--enforce-eager", "--no-enable-chunked-prefill"]
    assert environment("cpu", {"VLLM_CPU_KVCACHE_SPACE": "4"}) == {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip
    assert environment("cuda", {}) == {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def test_a_model_is_told_from_a_checkpoint(tmp_path: Path, checkpoint: Path):
    assert is_model(make_model(tmp_path / "model"))
    assert not is_model(checkpoint)
    assert served_name(Path("/models/Qwen3-8B")) == "Qwen3-8B"
    assert served_name(Path("/runs/mine/export/step_20")) == "mine-step_20"


def test_an_export_of_the_same_bytes_is_taken_and_of_others_refused(tmp_path: Path, checkpoint: Path):
    target = make_model(tmp_path / "mine" / "export" / "step_20", made_of="abc")
    assert exported(checkpoint) == target
    write_json(target / "keepstep_export.json", {"checkpoint": "other"})
    with pytest.raises(ConfigError, match="is not an export of"):
        exported(checkpoint)
    (target / "keepstep_export.json").unlink()
    with pytest.raises(ConfigError, match="is not an export of"):
        exported(checkpoint)


def test_an_export_of_verls_shards_is_taken_again_as_long_as_they_stand(tmp_path: Path):
    """They have no manifest with a digest to go by."""
    checkpoint = Path(shutil.copytree(VERL, tmp_path / "verl" / "global_step_20"))
    target = make_model(tmp_path / "verl" / "export" / "global_step_20", made_of=identity(checkpoint))
    assert exported(checkpoint) == target
    shard = next(checkpoint.rglob("model_world_size_*.pt"))
    shard.write_bytes(shard.read_bytes() + b"0")
    with pytest.raises(ConfigError, match="is not an export of"):
        exported(checkpoint)


def test_a_checkpoint_is_exported_first(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from keepstep.export import hugging_face

    asked: list[tuple[Path, Path]] = []

    def export(source: Path, target: Path) -> dict[str, Any]:
        asked.append((source, target))
        return {
            "step": 20, "num_tensors": 1, "num_parameters": 1, "num_bytes": 4, "dtype": "float32", "path": str(target),
            "loaded": True, "base": None,
        }  # fmt: skip

    monkeypatch.setattr(hugging_face, "export", export)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    latest = checkpoint.with_name("latest")
    latest.symlink_to("step_20")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda file, command, env: started.append(command))
    args = argparse.Namespace(path=str(latest), port=8001, tensor_parallel_size=2, gpu_memory_utilization=None)
    args.vllm_options = ["--max-model-len", "64"]
    serve_command.main(args)
    target = tmp_path / "mine" / "export" / "step_20"
    assert asked == [(checkpoint, target)]
    assert started[0][4] == str(target)
    assert started[0][-6:] == ["--port", "8001", "--tensor-parallel-size", "2", "--max-model-len", "64"]


def test_a_path_that_is_not_there_and_a_missing_vllm_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = argparse.Namespace(path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="nothing does not exist"):
        serve_command.main(args)
    monkeypatch.setattr(serve_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        serve_command.main(args)
