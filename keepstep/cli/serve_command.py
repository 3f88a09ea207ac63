"""`keepstep serve CKPT|OUT`: vLLM's OpenAI-compatible server on a checkpoint, which is exported first, once."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from keepstep.cli.export_command import default_target, described, existing
from keepstep.errors import ConfigError
from keepstep.export.origin import is_export_of
from keepstep.preflight.device import has_cuda

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def main(args: argparse.Namespace) -> NoReturn:
    """Become vLLM's server: signals, output and exit code are its own.

    Raises:
        ConfigError: vLLM is not installed, or the path is neither a checkpoint nor a Hugging Face folder.
        CheckpointError: the checkpoint cannot be exported.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed.", "make setup installs it; for a GPU see deployments/docker/Dockerfile."
        )
    path = existing(args.path)
    folder = path if is_model(path) else exported(path)
    device = "cuda" if has_cuda() else "cpu"
    options = {
        "--port": args.port,
        "--tensor-parallel-size": args.tensor_parallel_size,
        "--gpu-memory-utilization": args.gpu_memory_utilization,
    }
    command = server_command(folder, options, args.vllm_options, device)
    print(f"{folder} as {served_name(folder)!r} on port {args.port or 8000}", file=sys.stderr, flush=True)
    os.execvpe(command[0], command, os.environ | environment(device, dict(os.environ)))


def is_model(folder: Path) -> bool:
    """Whether this is a Hugging Face folder."""
    return (folder / "config.json").is_file() and any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def exported(checkpoint: Path) -> Path:
    """The checkpoint's export: the standing one of these very bytes, or a new one.

    Raises:
        ConfigError: an export of other bytes stands in its place.
    """
    target = default_target(checkpoint)
    if target.is_dir():
        if not is_export_of(target, checkpoint):
            raise ConfigError(
                f"{target} is not an export of {checkpoint}.", "Serve that folder itself, or move it away."
            )
        return target
    os.environ["HF_HUB_OFFLINE"] = "1"
    from keepstep.export.hugging_face import export

    target.parent.mkdir(parents=True, exist_ok=True)
    print(described(export(checkpoint, target)), file=sys.stderr, flush=True)
    return target


def served_name(folder: Path) -> str:
    """What a client calls the model: `<run>-step_<N>` of a run's own export, else the folder's name."""
    return f"{folder.parent.parent.name}-{folder.name}" if folder.parent.name == "export" else folder.name


def server_command(
    folder: Path, options: dict[str, int | float | None], passed_on: Sequence[str], device: str
) -> list[str]:
    """vLLM's command line. What is passed on stands last, so that it wins."""
    given = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    # Seeded requests crash the engine on a CPU when a prefill is split.
    cpu = ["--enforce-eager", "--no-enable-chunked-prefill"] if device == "cpu" else []
    # `vllm serve` asks for the version of a package `vllm`, which its CPU build is not called.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [*command, "--served-model-name", served_name(folder), *cpu, *given, *passed_on]


def environment(device: str, present: dict[str, str]) -> dict[str, str]:
    """Variables of the server that are not set yet: nothing is fetched or reported, a CPU's KV cache has a size."""
    wanted = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    return {name: value for name, value in wanted.items() if name not in present}
