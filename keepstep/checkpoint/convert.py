"""A checkpoint from one layout into the other: the same tensors, counters and identity in other files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout, reader
from keepstep.checkpoint.digest import digest_file
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import param_groups_json, write_file, write_manifest, write_torch
from keepstep.checkpoint.written import Written
from keepstep.errors import CheckpointError, ConfigError
from keepstep.run import fsync_dir, fsync_file, read_json


def convert(source: Path, target: Path, kind: str) -> Path:
    """Write `source` in layout `kind` as the new folder `target`, verified before it appears. Memory: one role.

    A `sharded` one that is written here has one shard per role; it loads on any number of ranks.

    Raises:
        CheckpointError: `source`, or what was written, does not verify.
        ConfigError: `target` exists.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", "Name a folder that does not exist yet.")
    verdict = verify(source)
    if verdict.manifest is None or not verdict.resumable:
        raise CheckpointError(
            f"{source} is {verdict.state}: {'; '.join(verdict.reasons) or 'it has no manifest'}", "Take another step."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".tmp-convert-{os.getpid()}"
    # Inside it under its own name, which verification compares with the manifest's step.
    temporary = aside / target.name
    temporary.mkdir(parents=True)
    try:
        _write(source, temporary, verdict.manifest, kind)
        found = verify(temporary, expected_run_id=verdict.manifest.run_id, expected_step=verdict.manifest.step)
        if not found.resumable:
            raise CheckpointError(f"What was written does not verify: {found.reasons[0]}", f"Is {target.parent} sound?")
        os.rename(temporary, target)
        fsync_dir(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(source: Path, target: Path, record: Manifest, kind: str) -> None:
    has_reference = any(name.startswith(f"{layout.REF_DIR}/") for name in record.files)
    roles = [reader.ACTOR, reader.OPTIMIZER, *([reader.REF] if has_reference else [])]
    written = Written()
    for role in roles:
        written.add(_write_role(source, target, role, kind))
    if kind == layout.SHARDED:
        groups = param_groups_json(reader.read_param_groups(source))
        written.files[layout.PARAM_GROUPS] = write_file(target / layout.PARAM_GROUPS, lambda file: file.write(groups))
    for name in record.files:
        if layout.is_optional(name) and not (source / name).exists():
            continue
        if name != layout.PARAM_GROUPS and not (name in reader.ROLE_FILES.values() or layout.shard_dir(name)):
            written.files[name] = _copy(source / name, target / name)
    if layout.SCHEDULER in record.tensors:
        written.tensors[layout.SCHEDULER] = record.tensors[layout.SCHEDULER]
    write_manifest(
        target,
        written,
        kind=kind,
        run_id=record.run_id,
        attempt=record.attempt,
        step=record.step,
        # Of a sharded one it is the number of shards; of a full one the ranks whose random streams it holds.
        world_size=1 if kind == layout.SHARDED else num_streams(source),
        has_reference=has_reference,
        metrics=record.metrics,
    )


def _write_role(source: Path, target: Path, role: str, kind: str) -> Written:
    value: dict[str, Any] = reader.read_role(source, role).tensors()
    if kind == layout.SHARDED:
        from keepstep.checkpoint.sharded import write_whole

        return write_whole(target, reader.ROLE_DIRS[role], value)
    if role == reader.OPTIMIZER:
        value = {"state": _nested(value), "param_groups": reader.read_param_groups(source)}
    return write_torch(target / reader.ROLE_FILES[role], reader.ROLE_FILES[role], value)


def num_streams(folder: Path) -> int:
    return len(read_json(folder / layout.TRAINER_STATE)["rng_states"]["per_rank"])


def _nested(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{parameter: {key: tensor}} of `state.<parameter>.<key>`."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in flat.items():
        parameter, _, key = name.removeprefix("state.").rpartition(".")
        found.setdefault(parameter, {})[key] = tensor
    return found


def _copy(source: Path, target: Path) -> Any:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    fsync_file(target)
    return digest_file(target)
