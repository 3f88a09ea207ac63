"""What a model folder must hold, and its identity by content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from keepstep.checkpoint.digest import digest_file
from keepstep.errors import ConfigError

IDENTITY_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".safetensors")


def check_model(folder: Path) -> None:
    """Raise `ConfigError` unless `folder` is a Hugging Face model with config, tokenizer and safetensors."""
    key = "actor_rollout_ref.model.path"
    if not folder.is_dir():
        raise ConfigError(f"{key}: {folder} is not a folder.", "Give a Hugging Face folder on this machine.")
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{key}: {folder} has no config.json: not a model.", "Give the folder that holds it.")
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{key}: {config} is not JSON: {error}.", "Fetch the model again.") from error
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}: {folder} has no *.safetensors.", "Convert its weights to safetensors.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{key}: {folder} has no tokenizer.", "Save its tokenizer into the same folder.")


def fingerprint(folder: Path) -> str:
    """Hex SHA-256 over names, sizes and digests of the files that make the model; the path does not count."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in IDENTITY_SUFFIXES:
            lines.append(f"{path.name} {path.stat().st_size} {digest_file(path).tree}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
