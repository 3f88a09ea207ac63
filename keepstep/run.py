"""The run directory. The only module that joins its paths and knows its names.

run.json  config.yaml  result.json  events.jsonl  metrics.jsonl  tensorboard/  rollouts/step_<N>.parquet
logs/attempt_<n>/train.log    attempts/<n>.json
checkpoints/step_<N>/  checkpoints/latest -> step_<N>  checkpoints/latest.txt  checkpoints/best  checkpoints/best.txt
quarantine/step_<N>.<reason>.<k>/    pins/<N>    export/
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError, DamagedFileError

_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
PLATFORM_DIR = ".keepstep"
UNPIN_SUFFIX = ".removed"
NO_LINK_ERRNOS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. `root` is absolute; nothing is created by constructing it."""

    root: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> RunDir:
        return cls(Path(os.path.abspath(os.path.expanduser(path))))

    @property
    def record(self) -> Path:
        return self.root / "run.json"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number}.json"

    def temporary(self, number: int) -> Path:
        """Ray's session folder and all other temporary files of an attempt, on the node of its controller.

        Not below the run: a socket's path holds 107 bytes.
        """
        return Path("/tmp") / f"keepstep-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}-{number}"

    def flow_heartbeat(self, number: int) -> Path:
        """When the flow that started an attempt was last alive, for starts on other hosts."""
        return self.attempts / f"{number}.flow.json"

    @property
    def budget(self) -> Path:
        """From which attempt on failures count, for which flow run."""
        return self.attempts / "budget.json"

    def log_dir(self, number: int) -> Path:
        return self.root / "logs" / f"attempt_{number}"

    def train_log(self, number: int) -> Path:
        return self.log_dir(number) / "train.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    @property
    def latest_link(self) -> Path:
        return self.checkpoints / "latest"

    @property
    def best_link(self) -> Path:
        return self.checkpoints / "best"

    def text_of(self, pointer: Path) -> Path:
        """What says the same as a pointer, for stores without links."""
        return pointer.with_suffix(".txt")

    def pointed_at(self, pointer: Path) -> int | None:
        """The step that `latest` or `best` names; None: there is no such pointer, or it names none."""
        text = self.text_of(pointer)
        return parse_step(text.read_text(errors="replace").strip()) if text.is_file() else None

    @property
    def pins(self) -> Path:
        """Steps that a person keeps: an empty file pins/<step> each."""
        return self.root / "pins"

    def pin(self, step: int) -> Path:
        return self.pins / str(step)

    def unpin(self, step: int) -> Path:
        """Says that a pin which the store may have holds no more."""
        return self.pins / f"{step}{UNPIN_SUFFIX}"

    def pinned_steps(self) -> frozenset[int]:
        return self._in_pins("")

    def unpinned_steps(self) -> frozenset[int]:
        return self._in_pins(UNPIN_SUFFIX)

    def _in_pins(self, suffix: str) -> frozenset[int]:
        if not self.pins.is_dir():
            return frozenset()
        names = [path.name.removesuffix(suffix) for path in self.pins.iterdir() if path.name.endswith(suffix)]
        return frozenset(int(name) for name in names if name.isdecimal())

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def uploads(self) -> Path:
        """What the store has confirmed: uploads/<step>.json, one file a step, so that no writer rewrites another's."""
        return self.root / "uploads"

    def upload(self, step: int) -> Path:
        return self.uploads / f"{step}.json"

    @property
    def platform(self) -> Path:
        """Embedded servers, made model and made data of all runs in the same parent folder."""
        return self.root.parent / PLATFORM_DIR

    @property
    def default_s3_prefix(self) -> str:
        """`<folder name>-<8 hex digits of the SHA-256 of the absolute path>`."""
        return f"{self.root.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"

    def steps(self) -> list[int]:
        """Published step folders in ascending numeric order. Temporary and foreign names do not count."""
        if not self.checkpoints.is_dir():
            return []
        found = (
            parse_step(entry.name) for entry in os.scandir(self.checkpoints) if entry.is_dir(follow_symlinks=False)
        )
        return sorted(step for step in found if step is not None)

    def attempt_numbers(self) -> list[int]:
        if not self.attempts.is_dir():
            return []
        names = (entry.name for entry in os.scandir(self.attempts))
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())

    def has_record(self) -> bool:
        return self.record.is_file()


def parse_step(name: str) -> int | None:
    """The step of a folder named exactly `step_<N>`, else None ("step_5-bak" and "old-step_5" are not steps)."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def read_json(path: Path) -> Any:
    """
    Raises:
        DamagedFileError: it is not JSON, which nothing of ours leaves behind: files are replaced as a whole.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFileError(
            f"{path} is damaged: {error}.",
            "Look at the disk. Bring the file back from a copy (a store, where one is configured, has run.json and "
            "config.yaml); a file under attempts/ may be deleted when nothing trains the run.",
        ) from None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` as a whole: temporary file beside it, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create `path` with its whole content, or return False when it exists. A hard link decides, which NFS honours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        raise ConfigError(
            f"{path.parent} is on a filesystem without hard links ({error.strerror}).",
            "Of two starts at once a hard link decides which one owns the run: put trainer.output_dir elsewhere.",
        ) from error
    finally:
        os.unlink(temporary)
    fsync_dir(path.parent)
    return True


def fsync_dir(path: Path) -> None:
    """Make renames inside `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Make names inside `folder`, and inside every folder below it, durable."""
    for path in sorted({folder, *(entry for entry in folder.rglob("*") if entry.is_dir())}):
        fsync_dir(path)


def fsync_file(path: Path) -> None:
    """Make the content of a file that is written and closed durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
