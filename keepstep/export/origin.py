"""Whose export a folder is: light, for commands that only look."""

from __future__ import annotations

import hashlib
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.run import read_json

RECORD = "keepstep_export.json"


def identity(checkpoint: Path) -> str:
    """What its manifest says of its bytes; of another trainer's folder, which has none, its files' names, sizes, times.

    Raises:
        OSError: it cannot be read.
    """
    manifest = checkpoint / layout.MANIFEST
    if manifest.is_file():
        return str(read_json(manifest)["self"])
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    described = "".join(f"{p.relative_to(checkpoint)}\0{p.stat().st_size}\0{p.stat().st_mtime_ns}\n" for p in files)
    return f"files:{hashlib.sha256(described.encode()).hexdigest()}"


def is_export_of(folder: Path, checkpoint: Path) -> bool:
    """Whether `folder` was exported from these very bytes."""
    record = folder / RECORD
    return record.is_file() and read_json(record).get("checkpoint") == identity(checkpoint)
