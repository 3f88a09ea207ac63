"""manifest.json: what a checkpoint holds, written last, covering itself.

{"layout", "version", "run_id", "attempt", "step", "world_size", "required": […],
 "files": {path: {"size", "part_size", "parts": [hex], "tree", "tensors": [[name, dtype, shape]], "num_nonfinite"}},
 "metrics", "self"}

`self` is the hex SHA-256 of the canonical JSON (UTF-8, keys sorted, no spaces) of the rest; the file's bytes are the
canonical form with `self` added.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from keepstep.checkpoint import layout, strict_json
from keepstep.checkpoint.digest import FileDigest, num_parts, part_size_for, tree_of

TensorInfo = list[list[Any]]
_HEX = set("0123456789abcdef")


class ManifestError(ValueError):
    """The bytes are no manifest of ours; the message says why."""


@dataclass(frozen=True)
class Manifest:
    layout: str
    version: int
    run_id: str
    attempt: int
    step: int
    world_size: int
    required: list[str]
    files: dict[str, FileDigest]
    tensors: dict[str, TensorInfo]
    nonfinite: dict[str, int]
    metrics: dict[str, Any]


def build(
    *,
    run_id: str,
    attempt: int,
    step: int,
    world_size: int,
    required: list[str],
    files: dict[str, FileDigest],
    tensors: dict[str, TensorInfo],
    metrics: dict[str, Any],
    nonfinite: dict[str, int],
    kind: str = layout.FULL,
) -> bytes:
    """The manifest's bytes; `kind` is the layout."""
    records = {path: digest.to_record() for path, digest in files.items()}
    for path in tensors:
        records[path] |= {"tensors": tensors[path], "num_nonfinite": nonfinite.get(path, 0)}
    rest: dict[str, Any] = {
        "layout": kind,
        "version": layout.LAYOUT_VERSION,
        "run_id": run_id,
        "attempt": attempt,
        "step": step,
        "world_size": world_size,
        "required": required,
        "files": records,
        "metrics": metrics,
    }
    return seal(rest)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seal(rest: dict[str, Any]) -> bytes:
    """Canonical bytes with `self` added."""
    return canonical(rest | {"self": hashlib.sha256(canonical(rest)).hexdigest()})


def parse(data: bytes) -> Manifest:
    """Read a manifest strictly.

    Raises:
        ManifestError: what is wrong, in one sentence.
    """
    try:
        value = strict_json.loads(data)
    except strict_json.StrictJsonError as error:
        raise ManifestError(str(error)) from error
    if not isinstance(value, dict) or not isinstance(value.get("self"), str):
        raise ManifestError("not an object with `self`")
    rest = {key: entry for key, entry in value.items() if key != "self"}
    try:
        sealed = seal(rest)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"cannot be written canonically: {error}") from error
    if sealed != data:
        raise ManifestError("`self` or the canonical form does not match: the file was changed")
    version = value.get("version")
    # `True` equals 1.
    known = value.get("layout") in (layout.FULL, layout.SHARDED)
    if not known or type(version) is not int or version != layout.LAYOUT_VERSION:
        raise ManifestError(
            f"layout {value.get('layout')!r} version {version!r}, "
            f"this release reads {layout.FULL!r} and {layout.SHARDED!r} version {layout.LAYOUT_VERSION}"
        )
    return _typed(value)


def check_path(path: str) -> None:
    """Raise `ManifestError` unless `path` is a plain relative path inside the folder."""
    pure = PurePosixPath(path)
    if not path or "\\" in path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise ManifestError(f"path {path!r} is not a plain path inside the checkpoint")


def _typed(value: dict[str, Any]) -> Manifest:
    kinds = {
        "run_id": str,
        "attempt": int,
        "step": int,
        "world_size": int,
        "required": list,
        "files": dict,
        "metrics": dict,
    }
    for key, kind in kinds.items():
        if type(value.get(key)) is not kind:
            raise ManifestError(f"`{key}` is {type(value.get(key)).__name__}, expected {kind.__name__}")
    for key in ("attempt", "step", "world_size"):
        if value[key] < 0:
            raise ManifestError(f"`{key}` is {value[key]}, expected a count")
    files: dict[str, FileDigest] = {}
    tensors: dict[str, TensorInfo] = {}
    nonfinite: dict[str, int] = {}
    for path, record in value["files"].items():
        check_path(path)
        files[path] = _digest(path, record)
        if "tensors" in record:
            tensors[path], nonfinite[path] = _tensors(path, record)
    missing = [path for path in value["required"] if not isinstance(path, str) or path not in files]
    if missing:
        raise ManifestError(f"required and not listed: {', '.join(map(str, missing))}")
    return Manifest(
        value["layout"], value["version"], value["run_id"], value["attempt"], value["step"], value["world_size"],
        list(value["required"]), files, tensors, nonfinite, value["metrics"],
    )  # fmt: skip


def _tensors(path: str, record: dict[str, Any]) -> tuple[TensorInfo, int]:
    """The file's tensors [[name, dtype, shape], …] and the number of their non-finite values."""
    tensors, num_nonfinite = record["tensors"], record.get("num_nonfinite")
    if type(num_nonfinite) is not int or num_nonfinite < 0:
        raise ManifestError(f"`num_nonfinite` of {path} is {num_nonfinite!r}, expected a count")
    if not isinstance(tensors, list) or not all(_is_tensor(entry) for entry in tensors):
        raise ManifestError(f"`tensors` of {path} is not a list of [name, dtype, shape]")
    return tensors, num_nonfinite


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    name, dtype, shape = entry
    is_shape = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
    return isinstance(name, str) and isinstance(dtype, str) and is_shape


def _digest(path: str, record: Any) -> FileDigest:
    try:
        digest = FileDigest.from_record(record)
        sound = (
            type(digest.size) is int
            and digest.size >= 0
            and digest.part_size == part_size_for(digest.size)
            and len(digest.parts) == num_parts(digest.size, digest.part_size)
            and all(len(part) == 64 and set(part) <= _HEX for part in digest.parts)
            and digest.tree == tree_of(digest.parts)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise ManifestError(f"the record of {path} is not a digest")
    return digest
