"""Writing one checkpoint of layout `full` from the ranks' snapshots. Heavy half: imports torch.

Order of a save: every file into a temporary folder beside the target, hashed while written, each fsynced; manifest
last; fsync of the folders; fence; rename; fsync of the parent. A kill at any point leaves a temporary folder, which
the next attempt sweeps, or a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepstep.attempts import check_fence
from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.digest import FileDigest, HashingWriter, digest_file
from keepstep.checkpoint.publish import publish, quarantine
from keepstep.checkpoint.verify import verify
from keepstep.errors import ExactnessError
from keepstep.run import RunDir, fsync_dir

TensorInfo = list[list[Any]]


@dataclass
class SaveRequest:
    """What is saved beside the tensors."""

    run_root: str
    run_id: str
    attempt: int
    step: int
    world_size: int
    has_reference: bool
    reference_step: int | None
    """Published step of this run whose `ref/` has the same content; None: the reference's shards come along."""
    trainer_state: dict[str, Any]
    """Everything of trainer_state.json but the random streams."""
    config_yaml: str
    model_files: str
    """Folder with the small Hugging Face files: config, tokenizer, generation config."""
    engine_state: dict[str, Any]
    waive_exactness: bool = False


@dataclass
class SaveResult:
    step: int
    outcome: str
    """`published`, or `replayed_equal` when a standing, verified checkpoint of the step has the same tensors."""
    num_bytes: int
    quarantined: str | None = None
    notes: list[str] = field(default_factory=list)


def save(request: SaveRequest, snapshots: list[Any], reference: list[dict[str, np.ndarray]] | None) -> SaveResult:
    """Write and publish one checkpoint.

    Args:
        snapshots: one `actor.shards.RankSnapshot` per rank, in rank order.
        reference: the reference's shards per rank, when there is no published copy to link.

    Raises:
        ExactnessError: the step stands already, verified, with other tensors.
        FencedError: a newer attempt owns the run.
        OSError: the filesystem refused.
    """
    run = RunDir.at(request.run_root)
    fence = lambda: check_fence(run, request.attempt)  # noqa: E731
    fence()
    folder = run.checkpoints / f".tmp-step_{request.step}-attempt_{request.attempt}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notes = _write_files(request, run, folder, snapshots, reference)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    quarantined = None
    if run.checkpoint(request.step).exists():
        if _standing_is_equal(request, run, folder):
            shutil.rmtree(folder)
            return SaveResult(request.step, "replayed_equal", num_bytes, notes=notes)
        reason = "replaced" if verify(run.checkpoint(request.step)).ok else "unverifiable"
        quarantined = str(quarantine(run, run.checkpoint(request.step), request.step, reason, fence))
    publish(folder, run, request.step, fence)
    return SaveResult(request.step, "published", num_bytes, quarantined, notes)


def assemble(shards: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Full tensors from the ranks' shards along dimension 0, in rank order."""
    return {name: _join([shard[name] for shard in shards]) for name in shards[0]}


def assemble_optimizer(snapshots: list[Any]) -> dict[str, Any]:
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


def _write_files(
    request: SaveRequest, run: RunDir, folder: Path, snapshots: list[Any], reference: list[dict[str, np.ndarray]] | None
) -> list[str]:
    """All files of the checkpoint and the manifest over them. Returns notes for the event."""
    files: dict[str, FileDigest] = {}
    tensors: dict[str, TensorInfo] = {}
    nonfinite: dict[str, int] = {}
    notes: list[str] = []
    objects: dict[str, Any] = {
        layout.ACTOR: assemble([snapshot.params for snapshot in snapshots]),
        layout.OPTIMIZER: assemble_optimizer(snapshots),
        layout.SCHEDULER: snapshots[0].scheduler,
    }
    if request.has_reference and request.reference_step is None:
        assert reference is not None, "a reference without a published copy comes with its shards"
        objects[layout.REF] = assemble(reference)
    for path, value in objects.items():
        files[path] = _write(folder / path, lambda file, value=value: torch.save(value, file))
        tensors[path], nonfinite[path] = describe_tensors(value)
    if request.has_reference and request.reference_step is not None:
        source = run.checkpoint(request.reference_step)
        record = manifest.parse((source / layout.MANIFEST).read_bytes())
        notes.append(_link(source / layout.REF, folder / layout.REF))
        files[layout.REF] = record.files[layout.REF]
        tensors[layout.REF] = record.tensors.get(layout.REF, [])
        nonfinite[layout.REF] = record.nonfinite.get(layout.REF, 0)
    for path, data in _small_files(request, snapshots).items():
        files[path] = _write(folder / path, lambda file, data=data: file.write(data))
    record_bytes = manifest.build(
        run_id=request.run_id,
        attempt=request.attempt,
        step=request.step,
        world_size=request.world_size,
        required=list(layout.required_files(request.has_reference)),
        files=files,
        tensors=tensors,
        metrics=request.trainer_state.get("metrics", {}),
        nonfinite=nonfinite,
    )
    _write(folder / layout.MANIFEST, lambda file: file.write(record_bytes))
    for directory in sorted({folder, *(entry for entry in folder.rglob("*") if entry.is_dir())}):
        fsync_dir(directory)
    return notes


def _small_files(request: SaveRequest, snapshots: list[Any]) -> dict[str, bytes]:
    per_rank = [snapshot.rng for snapshot in snapshots]
    state = request.trainer_state | {"rng_states": {**per_rank[0], "per_rank": per_rank}}
    found = {
        layout.TRAINER_STATE: json.dumps(state, indent=1, sort_keys=True, allow_nan=False).encode(),
        layout.CONFIG: request.config_yaml.encode(),
        layout.ENGINE_STATE: json.dumps(request.engine_state, indent=1, sort_keys=True).encode(),
    }
    for path in sorted(Path(request.model_files).iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            found[f"{layout.TOKENIZER_DIR}/{path.name}"] = path.read_bytes()
    return found


def _write(path: Path, produce: Any) -> FileDigest:
    """Create `path` with what `produce(file)` writes, hashed on the way, durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as raw:
        writer = HashingWriter(raw)
        produce(writer)
        writer.flush()
        os.fsync(raw.fileno())
    return writer.digest()


def _link(source: Path, target: Path) -> str:
    """Hard-link, or copy where links fail. Says which."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
        return "ref linked"
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
        return "ref copied"


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
    differing = [
        path
        for path in (layout.ACTOR, layout.OPTIMIZER, layout.SCHEDULER)
        if not _same_tensors(standing / path, folder / path)
    ]
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


def _same_tensors(first: Path, second: Path) -> bool:
    # Equal bytes are equal tensors; the container may differ between library versions, the tensors may not.
    if digest_file(first).tree == digest_file(second).tree:
        return True
    return _equal(_load(first), _load(second))


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    return first == second
