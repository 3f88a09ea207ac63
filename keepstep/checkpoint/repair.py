"""Mending a damaged reference. All steps share its bytes, so damage to it would make every step on disk unusable.

A copy counts when it has the digest that the manifest lists; where it comes from does not matter: another file on this
disk, the store, or the model that the run began from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest, digest_file
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.publish import Fence
from keepstep.run import RunDir, fsync_dir, fsync_file

Fetch = Callable[[str, FileDigest, Path], bool]
"""(file of the checkpoint, its digest, new file to write) -> whether this source had something to write."""


def mend_reference(run: RunDir, manifest: Manifest, sources: dict[str, Fetch], check_fence: Fence) -> dict[str, str]:
    """Replace every damaged file under `ref/` of a step, and of all steps that share it.

    Returns:
        File -> where its copy came from. A file that no source has is not in it.
    """
    step = run.checkpoint(manifest.step)
    mended: dict[str, str] = {}
    for name, digest in manifest.files.items():
        if not name.startswith(f"{layout.REF_DIR}/") or _is_whole(step / name, digest):
            continue
        sharing = [folder / name for folder in _folders(run) if _same_file(folder / name, step / name)]
        copy = run.checkpoints / f".tmp-mend-{digest.parts[0][:16]}"
        for where, fetch in sources.items():
            copy.unlink(missing_ok=True)
            if fetch(name, digest, copy) and _is_whole(copy, digest):
                fsync_file(copy)
                for path in {step / name, *sharing}:
                    check_fence()
                    _replace(path, copy)
                mended[name] = where
                break
        copy.unlink(missing_ok=True)
    return mended


def from_disk(run: RunDir) -> Fetch:
    """Other files of this run that have the digest: steps that could not share, what stands in quarantine."""

    def fetch(name: str, digest: FileDigest, target: Path) -> bool:
        for folder in _folders(run):
            if _is_whole(folder / name, digest):
                os.link(folder / name, target)
                return True
        return False

    return fetch


def from_model(model_dir: Path, manifest: Manifest) -> Fetch:
    """The reference was the base model at the first save: the same tensors in the same order give the same file."""

    def fetch(name: str, digest: FileDigest, target: Path) -> bool:
        if name != layout.REF or not list(model_dir.glob("*.safetensors")):
            return False
        import torch

        from keepstep.actor.base_weights import BaseWeights

        names = [info[0] for info in manifest.tensors.get(name, [])]
        found = BaseWeights(model_dir).tensors(names)
        # By a stream, as the writer does: by path, the archive would bear the file's name inside.
        with target.open("xb") as file:
            torch.save(found, file)
        return True

    return fetch


def _folders(run: RunDir) -> Iterator[Path]:
    yield from (run.checkpoint(step) for step in run.steps())
    yield from sorted(run.quarantine.iterdir()) if run.quarantine.is_dir() else ()


def _is_whole(path: Path, digest: FileDigest) -> bool:
    try:
        return path.stat().st_size == digest.size and digest_file(path).tree == digest.tree
    except OSError:
        return False


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _replace(path: Path, copy: Path) -> None:
    """Put a link to `copy` in the place of `path`, whole at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".mended-{path.name}")
    temporary.unlink(missing_ok=True)
    os.link(copy, temporary)
    os.replace(temporary, path)
    fsync_dir(path.parent)
