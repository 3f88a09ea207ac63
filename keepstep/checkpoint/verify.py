"""Is this checkpoint whole? Light half: torch is never imported and nothing is unpickled.

A folder is `verified` when its manifest parses, every listed file is a regular file with the listed size and digest,
nothing else lies in it, and the trainer's state is complete and of the same step. A foreign folder with the right
files but no digests is `unverified`: structurally whole, never resumed from by itself. One that has the weights of the
policy and lacks other files is `weights_only`: good for an export alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout, strict_json
from keepstep.checkpoint.digest import FileDigest, digest_parts, drop_from_cache
from keepstep.checkpoint.manifest import Manifest, ManifestError, parse
from keepstep.checkpoint.pickle_scan import scan
from keepstep.checkpoint.tensor_headers import Archive, HeaderError
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
            "path": str(self.path),
            "state": self.state,
            "reasons": self.reasons,
            "step": self.step,
            "epoch": self.epoch,
            "num_bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class _Findings:
    """Reasons as they are found, and what is learned on the way."""

    reasons: list[str] = field(default_factory=list)
    num_bytes: int = 0
    state: dict[str, Any] | None = None
    optimizer_steps: set[float] = field(default_factory=set)
    """Counters of updates in the optimizer's own state."""
    only_missing: bool = False
    """A foreign folder: what is there is sound, all reasons are of missing files."""


def verify(
    path: Path, *, quick: bool = False, expected_run_id: str | None = None, expected_step: int | None = None
) -> Verdict:
    """Verify a checkpoint folder.

    Args:
        path: the folder; `latest` may be a link to a step of the same parent, or a copy of one.
        quick: sizes, manifest and structure only; content is not hashed.
        expected_run_id, expected_step: what the caller knows; a difference is a reason.
    """
    begin = time.monotonic()
    folder = _follow_latest(path)
    if not folder.is_dir() or folder.is_symlink():
        return Verdict(path, REJECTED, ["not a folder"], seconds=time.monotonic() - begin)
    found = _Findings()
    manifest_path = folder / layout.MANIFEST
    if manifest_path.exists() or manifest_path.is_symlink():
        manifest = _read_manifest(manifest_path, found)
        if manifest is not None:
            _check_identity(path, folder, manifest, expected_run_id, expected_step, found)
            _check_files(folder, manifest, quick, found)
            _check_state(folder, manifest.step, found)
        step, state = manifest.step if manifest else None, VERIFIED
    else:
        manifest = None
        step = _check_foreign(folder, expected_step, found)
        state = UNVERIFIED
    if found.reasons:
        state = WEIGHTS_ONLY if found.only_missing and (folder / layout.ACTOR).exists() else REJECTED
    epoch = found.state.get("epoch") if found.state else None
    return Verdict(
        path, state, found.reasons, step, epoch if isinstance(epoch, int) else None,
        manifest, found.num_bytes, time.monotonic() - begin,
    )  # fmt: skip


def _follow_latest(path: Path) -> Path:
    """The target of a `latest` link when that is a step beside it; links elsewhere are not followed."""
    if path.is_symlink():
        target = Path(os.readlink(path))
        if len(target.parts) == 1 and parse_step(target.name) is not None:
            return path.parent / target
    return path


def _read_manifest(path: Path, found: _Findings) -> Manifest | None:
    if not _is_regular(path):
        found.reasons.append(f"{layout.MANIFEST}: not a regular file")
        return None
    if path.stat().st_size > strict_json.MAX_BYTES:
        found.reasons.append(
            f"{layout.MANIFEST}: {path.stat().st_size} bytes, at most {strict_json.MAX_BYTES} are read"
        )
        return None
    try:
        return parse(path.read_bytes())
    except ManifestError as error:
        found.reasons.append(f"{layout.MANIFEST}: {error}")
        return None


def _check_identity(
    path: Path, folder: Path, manifest: Manifest, run_id: str | None, step: int | None, found: _Findings
) -> None:
    named = parse_step(folder.name)
    if named is not None and named != manifest.step:
        found.reasons.append(f"{layout.MANIFEST}: is of step {manifest.step}, the folder is {folder.name}")
    if step is not None and step != manifest.step:
        found.reasons.append(f"{layout.MANIFEST}: is of step {manifest.step}, expected {step}")
    if run_id is not None and run_id != manifest.run_id:
        found.reasons.append(f"{layout.MANIFEST}: belongs to run {manifest.run_id}, expected {run_id}")
    has_reference = layout.REF in manifest.required
    for name in layout.required_files(has_reference):
        if name not in manifest.required:
            found.reasons.append(f"{layout.MANIFEST}: does not require {name}")


def _check_files(folder: Path, manifest: Manifest, quick: bool, found: _Findings) -> None:
    """Every listed file is there, regular, of the right size and content; nothing else is there."""
    present = _list_files(folder, found)
    has_rollout = (folder / layout.ROLLOUT_DIR).exists()
    for name, digest in manifest.files.items():
        if name.startswith(layout.ROLLOUT_DIR + "/") and not has_rollout:
            continue
        if name not in present:
            found.reasons.append(f"{name}: missing")
        else:
            _check_file(folder / name, name, digest, quick, found)
            if name in layout.TENSOR_FILES and not any(reason.startswith(f"{name}:") for reason in found.reasons):
                _check_tensors(folder / name, name, manifest, found)
    for name in sorted(present - set(manifest.files) - {layout.MANIFEST}):
        if not name.startswith(layout.ROLLOUT_DIR + "/"):
            found.reasons.append(f"{name}: foreign file, the manifest does not list it")


def _check_file(path: Path, name: str, digest: FileDigest, quick: bool, found: _Findings) -> None:
    size = path.lstat().st_size
    found.num_bytes += size
    if not _is_regular(path):
        found.reasons.append(f"{name}: not a regular file")
    elif size == 0 and digest.size > 0:
        found.reasons.append(f"{name}: empty, expected {digest.size} bytes")
    elif size != digest.size:
        found.reasons.append(f"{name}: {size} bytes, expected {digest.size}")
    elif not quick and (reason := _compare_content(path, digest)):
        found.reasons.append(f"{name}: {reason}")


def _check_tensors(path: Path, name: str, manifest: Manifest, found: _Findings) -> None:
    """What would be loaded: no code, and the tensors that the manifest lists."""
    if reasons := scan(path):
        found.reasons += [f"{name}: {reason}" for reason in reasons]
        return
    try:
        archive = Archive(path)
    except HeaderError as error:
        found.reasons.append(f"{name}: {error}")
        return
    listed = {info[0]: info[1:] for info in manifest.tensors.get(name, [])}
    there = {info[0]: info[1:] for info in archive.describe()}
    for tensor in sorted(listed.keys() | there.keys()):
        actual, expected = there.get(tensor), listed.get(tensor)
        if actual != expected:
            found.reasons.append(f"{name}: tensor {tensor} is {actual}, the manifest lists {expected}")
            return
    if name == layout.OPTIMIZER:
        counters = (tensor for key, tensor in archive.tensors().items() if key.endswith(".step"))
        found.optimizer_steps = {archive.scalar(tensor) for tensor in counters}


def _compare_content(path: Path, digest: FileDigest) -> str:
    """Why the content is not the listed one; empty when it is. Read past the page cache where the system allows."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    try:
        drop_from_cache(fd)
        parts = digest_parts(fd, digest.size, digest.part_size)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    finally:
        os.close(fd)
    for index, (actual, expected) in enumerate(zip(parts, digest.parts, strict=True)):
        if actual != expected:
            return f"part {index} has SHA-256 {actual[:12]}…, expected {expected[:12]}…"
    return ""


def _check_state(folder: Path, step: int, found: _Findings) -> None:
    """trainer_state.json: schema, and the same step as the manifest."""
    path = folder / layout.TRAINER_STATE
    if not _is_regular(path):
        return
    try:
        state = strict_json.loads(path.read_bytes())
    except (strict_json.StrictJsonError, OSError) as error:
        found.reasons.append(f"{layout.TRAINER_STATE}: {error}")
        return
    problems = state_problems(state)
    found.reasons += [f"{layout.TRAINER_STATE}: {problem}" for problem in problems]
    if not problems:
        found.state = state
        if state["global_step"] != step:
            found.reasons.append(f"{layout.TRAINER_STATE}: global_step {state['global_step']}, expected {step}")
        updates = state.get("num_updates")
        if updates is not None and found.optimizer_steps not in (set(), {float(updates)}):
            counted = ", ".join(f"{value:g}" for value in sorted(found.optimizer_steps))
            found.reasons.append(f"{layout.OPTIMIZER}: has counted {counted} updates, the trainer's state {updates}")


def state_problems(state: Any) -> list[str]:
    """What is wrong with the content of a trainer_state.json. Pure."""
    if not isinstance(state, dict):
        return ["not an object"]
    problems = []
    loader = state.get("dataloader_state")
    loader = loader if isinstance(loader, dict) else {}
    numbers = {
        "global_step": state.get("global_step"),
        "epoch": state.get("epoch"),
        "dataloader_state.train_dataset_offset": loader.get("train_dataset_offset"),
        "dataloader_state.val_dataset_offset": loader.get("val_dataset_offset"),
    }
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            problems.append(f"{name} is {value!r}, expected a count")
    rng = state.get("rng_states")
    if not isinstance(rng, dict):
        return [*problems, "rng_states is missing"]
    per_rank = rng.get("per_rank", [])
    if not isinstance(per_rank, list):
        return [*problems, "rng_states.per_rank is not a list"]
    for where, streams in [("rng_states", rng), *((f"rng_states.per_rank[{i}]", s) for i, s in enumerate(per_rank))]:
        problems += [
            f"{where}.{name} is not base64" for name in ("python", "numpy", "torch") if not _decodes(streams, name)
        ]
        cuda = streams.get("cuda") if isinstance(streams, dict) else None
        if not isinstance(cuda, list) or not all(_is_base64(entry) for entry in cuda):
            problems.append(f"{where}.cuda is not a list of base64")
    return problems


def _decodes(streams: Any, name: str) -> bool:
    return isinstance(streams, dict) and _is_base64(streams.get(name)) and bool(streams[name])


def _is_base64(text: Any) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return False
    return isinstance(text, str)


def _check_foreign(folder: Path, expected_step: int | None, found: _Findings) -> int | None:
    """A folder without manifest. Inside a Keepstep run it was never finished; elsewhere its structure is looked at."""
    if (folder.parent.parent / "run.json").is_file():
        found.reasons.append(f"{layout.MANIFEST}: missing, the checkpoint was never finished")
        return parse_step(folder.name)
    if not any((folder / name).exists() for name in layout.required_files()):
        found.reasons.append("not a checkpoint: none of " + ", ".join(layout.required_files()))
        return None
    missing = [name for name in layout.required_files() if not os.path.lexists(folder / name)]
    found.reasons += [f"{name}: missing" for name in missing]
    for name in sorted(set(layout.required_files()) - set(missing)):
        path = folder / name
        if not _is_regular(path) or path.stat().st_size == 0:
            found.reasons.append(f"{name}: empty or not a regular file")
        elif name in layout.TENSOR_FILES:
            found.num_bytes += path.stat().st_size
            found.reasons += [f"{name}: {reason}" for reason in scan(path)]
    step = parse_step(folder.name) if expected_step is None else expected_step
    if (folder / layout.TRAINER_STATE).is_file():
        try:
            state = strict_json.loads((folder / layout.TRAINER_STATE).read_bytes())
            found.state = state if isinstance(state, dict) else None
            named = state.get("global_step") if isinstance(state, dict) else None
            if not isinstance(named, int) or (step is not None and named != step):
                found.reasons.append(
                    f"{layout.TRAINER_STATE}: global_step {named!r}, expected {'a step' if step is None else step}"
                )
            step = named if isinstance(named, int) else step
        except strict_json.StrictJsonError as error:
            found.reasons.append(f"{layout.TRAINER_STATE}: {error}")
    found.only_missing = len(found.reasons) == len(missing)
    return step


def _list_files(folder: Path, found: _Findings) -> set[str]:
    """Relative paths of everything that is not a folder; links to folders are named and not entered."""
    names: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=False):
        for name in folders:
            if (Path(root) / name).is_symlink():
                found.reasons.append(f"{(Path(root) / name).relative_to(folder)}: a link out of the checkpoint")
        names |= {str((Path(root) / name).relative_to(folder)) for name in files}
    return names


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
