"""Writing one checkpoint from the ranks' snapshots. Heavy half: imports torch.

Order of a save: every file into a temporary folder beside the target, hashed while written, each fsynced; manifest
last; fsync of the folders; fence; rename; fsync of the parent. A kill at any point leaves a temporary folder, which
the next attempt sweeps, or a whole checkpoint.

Layout `full` is written by one process (`save`). Layout `sharded` is written by one process per rank: the first one
`begin`s, all write their shards (`sharded.ShardWriter`), the first one `finish`es.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep.actor.shards import RankSnapshot, ReferenceSnapshot, open_snapshot
from keepstep.attempts import check_fence
from keepstep.checkpoint import layout, manifest, reader
from keepstep.checkpoint.digest import FileDigest, HashingWriter, digest_file
from keepstep.checkpoint.publish import publish, quarantine
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.written import SaveRequest, SaveResult, Written
from keepstep.errors import ExactnessError, NoRoomError, no_room_cause
from keepstep.run import RunDir, fsync_file, fsync_tree

TensorInfo = list[list[Any]]
ROOM = 1.2
"""Free space that a save asks for, against the size of its tensors."""


def save(
    request: SaveRequest, snapshots: Sequence[RankSnapshot], reference: Sequence[ReferenceSnapshot] | None
) -> SaveResult:
    """Write and publish one checkpoint of layout `full`.

    Args:
        snapshots: one per rank, in rank order.
        reference: the reference's shards per rank, when there is no published copy to link.

    Raises:
        ExactnessError: the step stands already, verified, with other tensors.
        FencedError: a newer attempt owns the run.
        NoRoomError, OSError: the filesystem refused; what was written is removed again.
    """
    opened = [open_snapshot(snapshot) for snapshot in snapshots]
    folder = begin(request, sum(snapshot_bytes(snapshot) for snapshot in opened) + reference_bytes(reference))
    try:
        return finish(request, opened, _write_full(folder, opened, reference))
    except Exception as error:
        discard(request)
        # torch.save answers a full disk with an error of its own, in whose context the system's stands.
        if (cause := no_room_cause(error)) is not None:
            raise cause from None
        raise


def begin(request: SaveRequest, num_bytes: int) -> Path:
    """Make the temporary folder of a save that will take about `num_bytes`.

    Raises:
        FencedError: a newer attempt owns the run.
        NoRoomError: the filesystem has no room for it.
    """
    run = RunDir.at(request.run_root)
    check_fence(run, request.attempt)
    folder = temporary_folder(request)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # A quota (errno 122) does not show here; the write itself meets it.
    free, needed = shutil.disk_usage(folder).free, int(num_bytes * ROOM)
    if free < needed:
        folder.rmdir()
        raise NoRoomError(
            f"Saving step {request.step}: {run.checkpoints} has {free} bytes free, the checkpoint needs {needed}.",
            "Free space, lower checkpoint.keep_last, or go on without this save: checkpoint.on_no_room=skip.",
        )
    return folder


def finish(request: SaveRequest, snapshots: Sequence[RankSnapshot], written: Written) -> SaveResult:
    """Add what does not come by rank, the manifest last, and publish the step, unless it stands with equal tensors."""
    run, folder = RunDir.at(request.run_root), temporary_folder(request)
    fence = lambda: check_fence(run, request.attempt)  # noqa: E731
    _link_reference(request, run, folder, written)
    written.add(write_torch(folder / layout.SCHEDULER, layout.SCHEDULER, snapshots[0].scheduler))
    for path, data in _small_files(request, snapshots).items():
        written.files[path] = write_file(folder / path, lambda file, data=data: file.write(data))
    write_manifest(
        folder,
        written,
        kind=request.layout,
        run_id=request.run_id,
        attempt=request.attempt,
        step=request.step,
        world_size=request.world_size,
        has_reference=request.has_reference,
        metrics=request.trainer_state.get("metrics", {}),
    )
    num_bytes = sum(digest.size for digest in written.files.values())
    quarantined = None
    if run.checkpoint(request.step).exists():
        if _standing_is_equal(request, run, folder):
            shutil.rmtree(folder)
            return SaveResult(request.step, "replayed_equal", num_bytes)
        reason = "replaced" if verify(run.checkpoint(request.step)).ok else "unverifiable"
        quarantined = str(quarantine(run, run.checkpoint(request.step), request.step, reason, fence))
    publish(folder, run, request.step, fence)
    return SaveResult(request.step, "published", num_bytes, quarantined)


def begin_sharded(request: SaveRequest, snapshot: RankSnapshot, reference: Sequence[ReferenceSnapshot] | None) -> None:
    """`begin`, judged by the first rank's shards (no other rank has more), with a folder for every role.

    One process makes the folders: where all ranks make the same one at once, some parallel filesystems fail.
    """
    own_bytes = snapshot_bytes(open_snapshot(snapshot)) + reference_bytes(reference)
    folder = begin(request, request.world_size * own_bytes)
    for role_dir in layout.shard_dirs(request.has_reference):
        (folder / role_dir).mkdir(parents=True)


def finish_sharded(request: SaveRequest, snapshots: Sequence[RankSnapshot], parts: Sequence[Written]) -> SaveResult:
    """`finish` over what every rank's writer wrote."""
    written = Written()
    for part in parts:
        written.add(part)
    return finish(request, snapshots, written)


def discard(request: SaveRequest) -> None:
    """Remove what a save left that failed: on a full disk nothing else can be written before that."""
    shutil.rmtree(temporary_folder(request), ignore_errors=True)


def temporary_folder(request: SaveRequest) -> Path:
    """Beside the target, so that the rename never crosses a filesystem."""
    return RunDir.at(request.run_root).checkpoints / f".tmp-step_{request.step}-attempt_{request.attempt}"


def snapshot_bytes(snapshot: RankSnapshot) -> int:
    """Size of a rank's arrays."""
    moments = [value for state in snapshot.optimizer.values() for value in state.values()]
    return sum(array.nbytes for array in [*snapshot.params.values(), *moments])


def reference_bytes(reference: Sequence[ReferenceSnapshot] | None) -> int:
    return sum(array.nbytes for shards in reference or () for array in shards.params.values())


def assemble(shards: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Full tensors from the ranks' shards along dimension 0, in rank order."""
    return {name: _join([shard[name] for shard in shards]) for name in shards[0]}


def assemble_optimizer(snapshots: Sequence[RankSnapshot]) -> dict[str, Any]:
    """AdamW's state keyed by parameter name: {"state": {name: {step, exp_avg, exp_avg_sq}}, "param_groups": [...]}."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in snapshots[0].optimizer.items():
        state[name] = {
            key: torch.tensor(entry[key]) if key == "step" else _join([s.optimizer[name][key] for s in snapshots])
            for key in entry
        }
    return {"state": state, "param_groups": snapshots[0].param_groups}


def _join(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts[0].ndim else parts[0].copy())


def _write_full(
    folder: Path, snapshots: Sequence[RankSnapshot], reference: Sequence[ReferenceSnapshot] | None
) -> Written:
    """One file per role. One role is assembled at a time, so that memory holds no second copy of the whole state."""
    written = write_torch(folder / layout.ACTOR, layout.ACTOR, assemble([snapshot.params for snapshot in snapshots]))
    written.add(write_torch(folder / layout.OPTIMIZER, layout.OPTIMIZER, assemble_optimizer(snapshots)))
    if reference is not None:
        whole = assemble([shards.params for shards in reference])
        written.add(write_torch(folder / layout.REF, layout.REF, whole))
    return written


def write_torch(path: Path, name: str, value: Any) -> Written:
    digest = write_file(path, lambda file: torch.save(value, file))
    infos, num_bad = describe_tensors(value)
    return Written({name: digest}, {name: infos}, {name: num_bad})


def _link_reference(request: SaveRequest, run: RunDir, folder: Path, written: Written) -> None:
    """Take the reference over from the published step that has it."""
    if not request.has_reference or request.reference_step is None:
        return
    source = run.checkpoint(request.reference_step)
    record = manifest.parse((source / layout.MANIFEST).read_bytes())
    names = [name for name in record.files if name.startswith(f"{layout.REF_DIR}/")]
    for name in names:
        _link(source / name, folder / name)
    written.files |= {name: record.files[name] for name in names}
    written.tensors |= {name: record.tensors.get(name, []) for name in names}
    written.nonfinite |= {name: record.nonfinite.get(name, 0) for name in names}


def write_manifest(
    folder: Path,
    written: Written,
    *,
    kind: str,
    run_id: str,
    attempt: int,
    step: int,
    world_size: int,
    has_reference: bool,
    metrics: dict[str, Any],
) -> None:
    """The manifest over everything that was written; with it the folder is whole and durable."""
    required = layout.required_files(has_reference)
    if kind == layout.SHARDED:
        shards = sorted(name for name in written.files if layout.shard_dir(name))
        required = (*shards, layout.PARAM_GROUPS, layout.SCHEDULER, layout.TRAINER_STATE)
    record = manifest.build(
        kind=kind,
        run_id=run_id,
        attempt=attempt,
        step=step,
        world_size=world_size,
        required=list(required),
        files=written.files,
        tensors=written.tensors,
        metrics=metrics,
        nonfinite=written.nonfinite,
    )
    write_file(folder / layout.MANIFEST, lambda file: file.write(record))
    fsync_tree(folder)


def param_groups_json(param_groups: list[dict[str, Any]]) -> bytes:
    return json.dumps(param_groups, indent=1, allow_nan=False).encode()


def _small_files(request: SaveRequest, snapshots: Sequence[RankSnapshot]) -> dict[str, bytes]:
    per_rank = [snapshot.rng for snapshot in snapshots]
    state = request.trainer_state | {"rng_states": {**per_rank[0], "per_rank": per_rank}}
    found = {
        layout.TRAINER_STATE: json.dumps(state, indent=1, sort_keys=True, allow_nan=False).encode(),
        layout.CONFIG: request.config_yaml.encode(),
        layout.ENGINE_STATE: json.dumps(request.engine_state, indent=1, sort_keys=True).encode(),
    }
    if request.layout == layout.SHARDED:
        found[layout.PARAM_GROUPS] = param_groups_json(snapshots[0].param_groups)
    for path in sorted(Path(request.model_files).iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            found[f"{layout.TOKENIZER_DIR}/{path.name}"] = path.read_bytes()
    return found


def write_file(path: Path, produce: Any) -> FileDigest:
    """Create `path` with what `produce(file)` writes, hashed on the way, durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as raw:
        writer = HashingWriter(raw)
        produce(writer)
        writer.flush()
        os.fsync(raw.fileno())
    return writer.digest()


def _link(source: Path, target: Path) -> None:
    """Hard-link, or copy where links fail."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fsync_file(target)


def describe_tensors(value: Any, prefix: str = "") -> tuple[TensorInfo, int]:
    """[[name, dtype, shape], …] of every tensor in nested dicts, and how many of their values are not finite."""
    if isinstance(value, torch.Tensor):
        bad = int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
        return [[prefix, str(value.dtype).removeprefix("torch."), list(value.shape)]], bad
    if not isinstance(value, dict):
        return [], 0
    found: TensorInfo = []
    num_bad = 0
    for key, entry in value.items():
        infos, bad = describe_tensors(entry, f"{prefix}.{key}" if prefix else str(key))
        found += infos
        num_bad += bad
    return found, num_bad


def _standing_is_equal(request: SaveRequest, run: RunDir, folder: Path) -> bool:
    """Whether the published checkpoint of this step verifies and holds the same tensors as `folder`.

    Raises:
        ExactnessError: it verifies and differs, with no waiver.
    """
    standing = run.checkpoint(request.step)
    if not verify(standing, expected_run_id=request.run_id).ok:
        return False
    differing = [role for role in (reader.ACTOR, reader.OPTIMIZER) if not _same_role(standing, folder, role)]
    if not _same_file(standing / layout.SCHEDULER, folder / layout.SCHEDULER):
        differing.append("scheduler")
    if not differing:
        return True
    if request.waive_exactness:
        return False
    raise ExactnessError(
        f"Step {request.step} was trained again and differs from the verified {standing}: {', '.join(differing)}. "
        "A resumed run must give the same bytes.",
        "Something that decides the result changed (library versions, hardware, code): compare config.yaml of the two. "
        "To go on with the new result, add resume.allow=[exactness].",
    )


def _same_role(first: Path, second: Path, role: str) -> bool:
    names = {reader.ACTOR: layout.ACTOR, reader.OPTIMIZER: layout.OPTIMIZER}
    files = [folder / names[role] for folder in (first, second)]
    # Equal bytes are equal tensors; the container may differ between layouts and library versions.
    if all(file.exists() for file in files) and digest_file(files[0]).tree == digest_file(files[1]).tree:
        return True
    groups = [reader.read_param_groups(folder) for folder in (first, second)] if role == reader.OPTIMIZER else [0, 0]
    return groups[0] == groups[1] and _equal(*(reader.read_role(folder, role).tensors() for folder in (first, second)))


def _same_file(first: Path, second: Path) -> bool:
    return digest_file(first).tree == digest_file(second).tree or _equal(
        reader.read_file(first), reader.read_file(second)
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    return first == second
