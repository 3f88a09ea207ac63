"""The folder of a run: is it ours, does it take files, is there room."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from keepstep.errors import ConfigError, ContractError, NoRoomError
from keepstep.preflight.model import checkpoint_bytes
from keepstep.run import RunDir

MIN_FREE_BYTES = 256 * 1024**2


def check_room(run: RunDir) -> None:
    """Some room must be left where the run goes; the needs of a save are checked at the save."""
    parent = existing_parent(run.root)
    try:
        # Asking for permission is not enough: some filesystems permit everything to root and take nothing.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ConfigError(
            f"trainer.output_dir: {parent} takes no files: {error.strerror}.", "Give another folder."
        ) from None
    free = shutil.disk_usage(parent).free
    if free < MIN_FREE_BYTES:
        raise NoRoomError(
            f"{parent}: {free // 1024**2} MiB free, at least {MIN_FREE_BYTES // 1024**2} MiB are needed.",
            "Free space or move trainer.output_dir.",
        )


def existing_parent(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def check_foreign(run: RunDir) -> None:
    """A folder that holds something other than a Keepstep run is refused."""
    if run.has_record() or not run.root.exists():
        return
    # What a start leaves that was killed between its lease and its record.
    ours = {run.attempts.name, run.config.name}
    names = {entry.name for entry in run.root.iterdir()} - ours
    probes = (f".{run.record.name}.", f".{run.config.name}.", ".clock-", ".preflight-")
    strangers = sorted(name for name in names if not name.startswith(probes))
    if strangers:
        raise ContractError(
            f"trainer.output_dir: {run.root} holds {', '.join(strangers[:5])} but no run.json: not a Keepstep run.",
            "Give an empty or new folder, or bring run.json back.",
        )


def next_checkpoint_bytes(run: RunDir, model: Path) -> int:
    """Size of the newest checkpoint here, else what the model lets expect."""
    for step in reversed(run.steps()):
        try:
            return sum(path.stat().st_size for path in run.checkpoint(step).rglob("*") if path.is_file())
        except FileNotFoundError:
            # Retired while we look, by whoever trains this run.
            continue
    return checkpoint_bytes(model) if (model / "config.json").is_file() else 0


def size(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "bytes" else f"{value:.1f} {units[0]}"
