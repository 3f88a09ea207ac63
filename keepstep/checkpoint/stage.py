"""Staging: the checkpoint of a resume on each node's own disk, so that its ranks read no network. Light half.

The staged copy lies in a folder of its own, outside the run: retention does not see it, and nothing but the next
staging or the end of the loading removes it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.checkpoint.digest import FileDigest, HashingWriter
from keepstep.checkpoint.manifest import Manifest, parse
from keepstep.errors import CheckpointError
from keepstep.run import RunDir, parse_step

COPY_BYTES = 16 * 1024**2


def staged_run(stage_dir: str, run_id: str) -> RunDir:
    """Where a run's checkpoints are staged on a node."""
    return RunDir.at(Path(stage_dir) / f"keepstep-{run_id}")


def files_to_stage(manifest: Manifest, ranks: list[int], world_size: int) -> list[str]:
    """What the ranks of one node load. Pure.

    Of layout `sharded`, saved by as many ranks, that is their own shards; saved by another number, all of them. Small
    files come along.
    """
    own = {f"shard-{rank + 1:05d}-" for rank in ranks}
    found = []
    for name in manifest.files:
        folder = layout.shard_dir(name)
        is_other = folder is not None and name.removeprefix(f"{folder}/")[:12] not in own
        if not is_other or manifest.world_size != world_size:
            found.append(name)
    return found


def stage(source: Path, stage_dir: str, run_id: str, ranks: list[int], world_size: int) -> Path:
    """Copy what this node's ranks load of `source` to its own disk, each file compared with the manifest on the way.

    Raises:
        CheckpointError: what was read is not what the manifest says.
        OSError: `stage_dir` takes no files.
    """
    data = (source / layout.MANIFEST).read_bytes()
    manifest = parse(data)
    target = staged_run(stage_dir, run_id).checkpoint(manifest.step)
    clear(stage_dir, run_id)
    for name in files_to_stage(manifest, ranks, world_size):
        if (source / name).exists() or not layout.is_optional(name):
            _copy(source / name, target / name, manifest.files[name])
    (target / layout.MANIFEST).write_bytes(data)
    return target


def clear(stage_dir: str, run_id: str) -> None:
    """Remove what is staged of a run on this node: loaded by now, or left by an attempt that was killed."""
    folder = staged_run(stage_dir, run_id).checkpoints
    for entry in folder.iterdir() if folder.is_dir() else ():
        if parse_step(entry.name) is not None or entry.name.startswith("."):
            shutil.rmtree(entry)


def _copy(source: Path, target: Path, expected: FileDigest) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb") as raw:
        written = HashingWriter(raw)
        while block := read.read(COPY_BYTES):
            written.write(block)
        raw.flush()
        os.fsync(raw.fileno())
    if written.digest().tree != expected.tree:
        raise CheckpointError(
            f"{source} was read as {written.digest().size} bytes of another content than its manifest lists.",
            f"Verify it: keepstep verify {source.parent.parent}",
        )
