"""Is this checkpoint whole? Light half: torch is never imported and nothing is unpickled.

A folder is `verified` when its manifest parses, every listed file is a regular file with the listed size and digest,
nothing else lies in it, the tensors are those that the manifest lists, and the trainer's state is complete and of the
same step. A foreign folder with the right files but no digests is `unverified`: structurally whole, never resumed from
by itself. One that has the weights of the policy and lacks other files is `weights_only`: good for an export alone.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from keepstep.checkpoint import layout, strict_json
from keepstep.checkpoint.digest import FileDigest, digest_parts
from keepstep.checkpoint.files import (
    DISK,
    PAGE_CACHE,
    FileError,
    drop_and_tell,
    list_files,
    open_regular,
    printable,
    read_small,
    size_of,
)
from keepstep.checkpoint.findings import Findings
from keepstep.checkpoint.hugging_face import index_problems
from keepstep.checkpoint.manifest import Manifest, ManifestError, parse
from keepstep.checkpoint.pickle_scan import scan
from keepstep.checkpoint.safetensors_headers import SafetensorsFile
from keepstep.checkpoint.shard_cover import Shards, cover_problems, optimizer_problems, reference_problems
from keepstep.checkpoint.tensor_headers import Archive, HeaderError, TensorInfo
from keepstep.checkpoint.torch_zip import ArchiveError, TorchZip
from keepstep.checkpoint.trainer_state import param_group_problems, state_problems
from keepstep.run import parse_step

VERIFIED, UNVERIFIED, REJECTED, WEIGHTS_ONLY = "verified", "unverified", "rejected", "weights_only"


@dataclass
class Verdict:
    """What verification found."""

    path: Path
    state: str
    reasons: list[str]
    """Each one sentence: the file, what was found, what was expected."""
    step: int | None = None
    epoch: int | None = None
    manifest: Manifest | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    quick: bool = False
    """Sizes and headers only: `state` says nothing of the content."""
    read_from: str | None = None
    """`disk`, or `page cache` when some of the content did not come past it; None: no content was read."""
    notes: list[str] = field(default_factory=list)
    """What can be said of a checkpoint without digests."""

    @property
    def ok(self) -> bool:
        return self.state in (VERIFIED, UNVERIFIED)

    @property
    def exportable(self) -> bool:
        """Whether at least the weights are whole."""
        return self.ok or self.state == WEIGHTS_ONLY

    @property
    def resumable(self) -> bool:
        return self.state == VERIFIED

    def to_record(self) -> dict[str, Any]:
        return {
            "path": printable(str(self.path), 4096),
            "state": self.state,
            "quick": self.quick,
            "reasons": self.reasons,
            "notes": self.notes,
            "step": self.step,
            "epoch": self.epoch,
            "num_bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "read_from": self.read_from,
        }


def verify(
    path: Path, *, quick: bool = False, expected_run_id: str | None = None, expected_step: int | None = None
) -> Verdict:
    """Verify a checkpoint folder.

    Args:
        path: the folder; `latest` may be a link to a step of the same parent, or a copy of one.
        quick: sizes, manifest, headers and structure only; content is not hashed.
        expected_run_id, expected_step: what the caller knows; a difference is a reason.
    """
    begin = time.monotonic()
    folder = _follow_latest(path)
    found = Findings()
    manifest, step, state = None, None, REJECTED
    if os.path.islink(folder) or not os.path.isdir(folder):
        found.reject("", "not a folder")
    elif os.path.lexists(folder / layout.MANIFEST):
        manifest = _read_manifest(folder / layout.MANIFEST, found)
        if manifest is not None:
            step = manifest.step
            _check_identity(folder, manifest, expected_run_id, expected_step, found)
            _check_files(folder, manifest, quick, found)
            _check_state(folder, manifest, found)
        state = REJECTED if found.reasons else VERIFIED
    else:
        # Rarely wanted, and a fifth of the start of every command that looks at a run.
        from keepstep.checkpoint import foreign

        step = foreign.check(folder, expected_step, quick, found)
        whole = not found.reasons and not found.missing
        state = UNVERIFIED if whole else WEIGHTS_ONLY if not found.reasons else REJECTED
        found.reject("", *found.missing)
    read_from = (PAGE_CACHE if PAGE_CACHE in found.read_from else DISK) if found.read_from else None
    return Verdict(
        path, state, found.all_reasons(), step, found.state["epoch"] if found.state else None,
        manifest, found.num_bytes, time.monotonic() - begin, quick, read_from, found.notes,
    )  # fmt: skip


def _follow_latest(path: Path) -> Path:
    """The target of a `latest` link when that is a step beside it; links elsewhere are not followed."""
    if os.path.islink(path):
        target = Path(os.readlink(path))
        if len(target.parts) == 1 and parse_step(target.name) is not None:
            return path.parent / target
    return path


def _read_manifest(path: Path, found: Findings) -> Manifest | None:
    try:
        return parse(read_small(path, strict_json.MAX_BYTES))
    except (FileError, ManifestError) as error:
        found.reject(layout.MANIFEST, str(error))
        return None


def _check_identity(folder: Path, manifest: Manifest, run_id: str | None, step: int | None, found: Findings) -> None:
    named = parse_step(folder.name)
    if named is not None and named != manifest.step:
        found.reject(layout.MANIFEST, f"is of step {manifest.step}, the folder is {folder.name}")
    if step is not None and step != manifest.step:
        found.reject(layout.MANIFEST, f"is of step {manifest.step}, expected {step}")
    if run_id is not None and run_id != manifest.run_id:
        found.reject(layout.MANIFEST, f"belongs to run {manifest.run_id}, expected {run_id}")
    required = set(manifest.required)
    if manifest.layout == layout.SHARDED:
        needed = [layout.SCHEDULER, layout.PARAM_GROUPS, layout.TRAINER_STATE]
        has_reference = any(layout.shard_dir(name) == layout.REF_SHARDS for name in manifest.files)
        shards = [name for name in manifest.files if layout.shard_dir(name)]
        for directory in layout.shard_dirs(has_reference):
            if not any(layout.shard_dir(name) == directory for name in shards):
                found.reject(layout.MANIFEST, f"lists no shard of {directory}")
        needed += shards
    else:
        needed = list(layout.required_files(layout.REF in required))
    found.reject(layout.MANIFEST, *(f"does not require {name}" for name in needed if name not in required))


def _check_files(folder: Path, manifest: Manifest, quick: bool, found: Findings) -> None:
    """Every listed file is there, regular, of the right size and content; nothing else is there."""
    present, problems = list_files(folder)
    found.reject("", *problems)
    shards: Shards = {}
    for name, digest in manifest.files.items():
        if name in present:
            _check_file(folder / name, name, digest, manifest, quick, found, shards)
        elif not layout.is_optional(name):
            found.reject(name, "missing")
    for name in sorted(present - set(manifest.files) - {layout.MANIFEST}):
        if not layout.is_optional(name):
            found.reject(name, "foreign file, the manifest does not list it")
    if manifest.layout == layout.SHARDED:
        _check_cover(shards, manifest.world_size, found)
    _check_roles(manifest, found)


def _check_file(
    path: Path, name: str, digest: FileDigest, manifest: Manifest, quick: bool, found: Findings, shards: Shards
) -> None:
    try:
        with open_regular(path) as file:
            found.num_bytes += size_of(file)
            if reason := _compare(file, digest, quick, found):
                found.reject(name, reason)
            elif layout.shard_dir(name):
                _check_shard(file, name, manifest, found, shards)
            elif layout.holds_tensors(name):
                _check_archive(file, name, manifest, found)
            elif name == layout.PARAM_GROUPS:
                found.reject(name, *param_group_problems(strict_json.load(path)))
            elif name.endswith(".index.json"):
                found.reject(name, *index_problems(path))
    except (FileError, strict_json.StrictJsonError) as error:
        found.reject(name, str(error))


def _compare(file: BinaryIO, digest: FileDigest, quick: bool, found: Findings) -> str:
    """Why the content is not the listed one; empty when it is. Read past the page cache where the system allows."""
    size = size_of(file)
    if size != digest.size:
        return f"empty, expected {digest.size} bytes" if size == 0 else f"{size} bytes, expected {digest.size}"
    if quick:
        return ""
    try:
        found.read_from.add(drop_and_tell(file))
        parts = digest_parts(file.fileno(), digest.size, digest.part_size)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    for index, (actual, expected) in enumerate(zip(parts, digest.parts, strict=True)):
        if actual != expected:
            return f"part {index} has SHA-256 {actual[:12]}…, expected {expected[:12]}…"
    return ""


def _check_archive(file: BinaryIO, name: str, manifest: Manifest, found: Findings) -> None:
    """What would be loaded: no code, and the tensors that the manifest lists."""
    try:
        zipped = TorchZip(file)
        if reasons := scan(zipped):
            found.reject(name, *reasons)
            return
        archive = Archive(zipped)
        _compare_tensors(name, archive.describe(), manifest, found)
        if name not in found.named:
            found.shapes[name] = {key: tensor.shape for key, tensor in archive.tensors().items()}
        if name == layout.OPTIMIZER:
            counters = (tensor for key, tensor in archive.tensors().items() if key.endswith(".step"))
            found.optimizer_steps |= {archive.scalar(tensor) for tensor in counters}
    except (ArchiveError, HeaderError) as error:
        found.reject(name, str(error))


def _check_shard(file: BinaryIO, name: str, manifest: Manifest, found: Findings, shards: Shards) -> None:
    """One rank's part of a role: its header fits the file and the manifest."""
    try:
        header = SafetensorsFile(file)
        _compare_tensors(name, header.describe(), manifest, found)
        if layout.shard_dir(name) == layout.OPTIMIZER_SHARDS:
            found.optimizer_steps |= {header.scalar(key) for key in header.shards if key.endswith(".step")}
        shards[name] = header.shards
    except HeaderError as error:
        found.reject(name, str(error))


def _compare_tensors(name: str, described: TensorInfo, manifest: Manifest, found: Findings) -> None:
    listed = {info[0]: info[1:] for info in manifest.tensors.get(name, [])}
    there = {info[0]: info[1:] for info in described}
    for tensor in sorted(listed.keys() | there.keys()):
        actual, expected = there.get(tensor), listed.get(tensor)
        if actual != expected:
            found.reject(name, f"tensor {tensor} is {actual}, the manifest lists {expected}")
            return


def _check_cover(shards: Shards, world_size: int, found: Findings) -> None:
    """The shards of every role make whole tensors. A role with a damaged file has its reason already."""
    for directory in layout.SHARD_DIRS:
        of_role = {name: tensors for name, tensors in shards.items() if layout.shard_dir(name) == directory}
        if not of_role or found.is_named(f"{directory}/"):
            continue
        # A reference may be linked from a step that another number of ranks wrote.
        ranks = None if directory == layout.REF_SHARDS else world_size
        shapes, problems = cover_problems(of_role, ranks)
        found.reject("", *problems)
        if not problems:
            found.shapes[directory] = shapes


def _check_roles(manifest: Manifest, found: Findings) -> None:
    """The tensors of the optimizer and of the reference fit those of the policy; what is damaged is left out."""
    full = (layout.ACTOR, layout.OPTIMIZER, layout.REF)
    names = layout.SHARD_DIRS if manifest.layout == layout.SHARDED else full
    policy, optimizer, reference = (found.shapes.get(name) for name in names)
    if policy is not None and optimizer is not None:
        found.reject(names[1], *optimizer_problems(policy, optimizer))
    if policy is not None and reference is not None:
        found.reject(names[2], *reference_problems(policy, reference))


def _check_state(folder: Path, manifest: Manifest, found: Findings) -> None:
    """trainer_state.json: schema, and the same step and updates as the manifest and the optimizer."""
    if layout.TRAINER_STATE in found.named:
        return
    try:
        state = strict_json.load(folder / layout.TRAINER_STATE)
    except strict_json.StrictJsonError as error:
        found.reject(layout.TRAINER_STATE, str(error))
        return
    problems = state_problems(state)
    found.reject(layout.TRAINER_STATE, *problems)
    if problems:
        return
    found.state = state
    if state["global_step"] != manifest.step:
        found.reject(layout.TRAINER_STATE, f"global_step {state['global_step']}, expected {manifest.step}")
    num_streams = len(state["rng_states"].get("per_rank", []))
    if num_streams < manifest.world_size:
        found.reject(layout.TRAINER_STATE, f"random streams of {num_streams} ranks, expected {manifest.world_size}")
    optimizer = layout.OPTIMIZER_SHARDS if manifest.layout == layout.SHARDED else layout.OPTIMIZER
    counted = sorted(found.optimizer_steps)
    if not found.is_named(optimizer) and counted != ([float(state["num_updates"])] if state["num_updates"] else []):
        numbers = ", ".join(f"{value:g}" for value in counted[:5]) or "no"
        found.reject(optimizer, f"has counted {numbers} updates, the trainer's state {state['num_updates']}")
