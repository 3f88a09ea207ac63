"""The model's folder: where a name leads, what must be in it, and its identity by content."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import digest_file
from keepstep.errors import ConfigError, ContractError
from keepstep.quickstart.make import PREFIX, made_path
from keepstep.run import RunDir

KEY = "actor_rollout_ref.model.path"
TENSOR_PARALLEL_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
IDENTITY_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".safetensors")
Files = dict[str, dict[str, Any]]
"""{"size", "digest"} by name, of the files that make the model."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HASH = re.compile(r"[0-9a-f]{40}")


def model_folder(name: str, run: RunDir) -> Path:
    """The folder that `actor_rollout_ref.model.path` means: a path, what `made:` names, a hub id that is cached here.

    A folder that is not there is returned as well; `check_model` says so.
    """
    if name.startswith(PREFIX):
        return made_path(name, run)
    folder = Path(name).expanduser()
    if folder.exists() or not _HUB_ID.fullmatch(name):
        return folder
    return _cached(name) or folder


def check_model(name: str, folder: Path, used: str = "") -> None:
    """Raise `ConfigError` unless `folder` is a Hugging Face model with config, tokenizer and safetensors.

    Args:
        used: what the run's first start gave, for the message.
    """
    before = f"; this run was started with {used}" if used and used != name else ""
    if not folder.is_dir():
        if _HUB_ID.fullmatch(name):
            raise ConfigError(
                f"{KEY}: {name} is neither a folder nor a model in the cache {_hub_cache()}{before}.",
                f"Fetch it first (`hf download {name}`), or give the folder that holds it.",
            )
        raise ConfigError(f"{KEY}: {folder} is not a folder{before}.", "Give a Hugging Face folder on this machine.")
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{KEY}: {folder} has no config.json: not a model.", "Give the folder that holds it.")
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{KEY}: {config} is not JSON: {error}.", "Fetch the model again.") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{KEY}: {folder} has no *.safetensors.", "Convert its weights to safetensors.")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{KEY}: {folder} has no tokenizer.", "Save its tokenizer into the same folder.")


def check_tensor_parallel(size: int, folder: Path) -> None:
    """Raise `ConfigError` unless an engine can divide the model of `folder` over `size` workers."""
    config = json.loads((folder / "config.json").read_bytes())
    config = config.get("text_config", config)
    found = {name: config.get(name) or size for name in ("num_attention_heads", "intermediate_size")}
    problems = [f"{name} {value}" for name, value in found.items() if value % size]
    shared = config.get("num_key_value_heads") or size
    # Fewer of these than workers are repeated.
    if shared % size and size % shared:
        problems.append(f"num_key_value_heads {shared}")
    if problems:
        raise ConfigError(
            f"{TENSOR_PARALLEL_KEY}={size} does not divide the model of {folder}: {', '.join(problems)}.",
            "Give a number that divides them, as 1 does.",
        )


def refuse_checkpoint(folder: Path, run: RunDir) -> None:
    """A checkpoint is not given as a model: what is meant is a resume or a warm start, which are said otherwise.

    Raises:
        ContractError: the folder is a checkpoint, or lies in one; of this run or of another.
    """
    real = Path(os.path.realpath(folder))
    for candidate in (real, *real.parents[:2]):
        if (candidate / layout.MANIFEST).is_file() and (candidate / layout.TRAINER_STATE).is_file():
            own = candidate.parent == Path(os.path.realpath(run.checkpoints))
            whose = "a checkpoint of this run" if own else "a checkpoint"
            resume = (
                "To go on with the run give its model as before: the same command resumes by itself, or from one "
                f"checkpoint with trainer.resume_from_checkpoint={candidate}. "
            )
            raise ContractError(
                f"{KEY}: {folder} is {whose}, not a model.",
                (resume if own else "") + f"To begin a new run from its weights: trainer.init_from={candidate}.",
            )


def model_files(folder: Path) -> Files:
    """Size and digest of the files that make the model."""
    return {
        path.name: {"size": path.stat().st_size, "digest": digest_file(path).tree}
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in IDENTITY_SUFFIXES
    }


def fingerprint(folder: Path) -> str:
    """`fingerprint_of` the files of a folder."""
    return fingerprint_of(model_files(folder))


def fingerprint_of(files: Files) -> str:
    """Hex SHA-256 over names, sizes and digests; the path does not count."""
    lines = [f"{name} {files[name]['size']} {files[name]['digest']}" for name in sorted(files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def differing_files(then: Files, now: Files) -> list[str]:
    """One line per file that is not what it was. Pure."""
    lines = []
    for name in sorted(then.keys() | now.keys()):
        before, after = then.get(name), now.get(name)
        if before is None:
            lines.append(f"{name} is new")
        elif after is None:
            lines.append(f"{name} is gone")
        elif before["size"] != after["size"]:
            lines.append(f"{name} had {before['size']} bytes, has {after['size']}")
        elif before["digest"] != after["digest"]:
            lines.append(f"{name} has other content at the same size")
    return lines


def checkpoint_bytes(folder: Path) -> int:
    """About what one checkpoint of this model takes: weights, two moments and reference in float32."""
    config = json.loads((folder / "config.json").read_bytes())
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    item_bytes = 2 if stored in ("bfloat16", "float16") else 4
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 4 * 4 // item_bytes


def _hub_cache() -> Path:
    """Where Hugging Face keeps models (HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, in its own order)."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"
    return Path(os.environ.get("HF_HOME", home)).expanduser() / "hub"


def _cached(hub_id: str) -> Path | None:
    """The snapshot of a hub id's `main` in the cache, if it is there."""
    repository = _hub_cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if _HASH.fullmatch(revision) and snapshot.is_dir() else None
