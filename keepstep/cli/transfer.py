"""`keepstep upload RUN [--step N]` (also the trainer's uploader process) and `keepstep download RUN --step N`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.attempts import check_fence
from keepstep.cli.inspect_commands import no_run
from keepstep.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, HeldError, KeepstepError, StorageError
from keepstep.events.log import utc_now
from keepstep.run import RunDir, read_json, write_json

if TYPE_CHECKING:
    from keepstep.config.schema import CheckpointConfig, S3Config
    from keepstep.storage.remote import RemoteRun

ABORT_S = 12.0
CONFIG_VARIABLE = "KEEPSTEP_UPLOAD_CONFIG_JSON"
"""`{"s3": …, "checkpoint": …}` of the start that the upload belongs to."""
PROGRESS_S = 5.0


def upload(args: argparse.Namespace) -> int:
    """Upload a step (default: the newest on disk) and record that the store confirmed it.

    With `args.json`, one JSON object on stdout in either case: what was done, or class and message of the failure.
    """
    return _answer(args, _upload)


def download(args: argparse.Namespace) -> int:
    """Bring a step from the store into the run, verified."""
    return _answer(args, _download)


def _answer(args: argparse.Namespace, act: Callable[[argparse.Namespace], dict[str, Any]]) -> int:
    if getattr(args, "watch_stdin", False):
        _leave_with_parent()
        _yield_the_disk()
    try:
        record = act(args)
    except KeepstepError as error:
        if not args.json:
            raise
        print(json.dumps({"class": error.failure_class, "message": error.message, "remedy": error.remedy}))
        return error.exit_code
    print(json.dumps(record) if args.json else _sentence(record))
    return EXIT_DONE


def _upload(args: argparse.Namespace) -> dict[str, Any]:
    from keepstep.storage import lease
    from keepstep.storage.remote import open_remote, upload_checkpoint

    run = _existing_run(args.run)
    step = args.step if args.step is not None else _newest(run)
    attempt: int | None = getattr(args, "attempt", None)
    config, checkpoint = _configs(run)
    progress = _Progress(step, run.checkpoint(step), visible=getattr(args, "watch_stdin", False))
    remote = open_remote(config, run)

    def fence() -> None:
        if attempt is not None:
            check_fence(run, attempt)

    def full_fence() -> None:
        fence()
        if attempt is not None:
            lease.check(remote.store, run, attempt)

    try:
        report = upload_checkpoint(remote, run, step, attempt, fence, progress.add)
        fence()
        record = {
            "step": step,
            "time": utc_now(),
            "num_bytes": report.num_bytes,
            "bucket": remote.bucket,
            "prefix": remote.prefix,
        }
        write_json(run.upload(step), record)
        # Deleting from the store is for who owns the run there.
        cleared = _clear(remote, run, config, checkpoint, full_fence) if attempt is not None else {}
    finally:
        remote.close()
    counts = {"num_uploaded": report.num_uploaded, "num_present": report.num_present}
    return {"action": "uploaded", **record, **counts, **cleared}


def _clear(
    remote: RemoteRun, run: RunDir, config: S3Config, checkpoint: CheckpointConfig, fence: Callable[[], None]
) -> dict[str, Any]:
    """What follows an upload in the store. A failure is told and harms nothing: the next upload comes back to it."""
    from keepstep.storage.retire import retire, sweep_uploads

    retired: list[dict[str, Any]] = []
    done: dict[str, Any] = {"retired": retired}
    try:
        done["num_swept"] = sweep_uploads(remote, run, fence)
        if config.keep_remote == "retention":
            run_id = read_json(run.record)["run_id"]
            retire(
                remote,
                run,
                run_id,
                checkpoint,
                fence,
                lambda step, reason: retired.append({"step": step, "reason": reason}),
            )
    except StorageError as error:
        done["clear_error"] = error.message
    return done


class _Progress:
    """Bytes done of one upload, told as JSON lines on stderr every few seconds if somebody reads them."""

    def __init__(self, step: int, folder: Path, visible: bool) -> None:
        self._step, self._visible, self._done = step, visible, 0
        self._num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._told = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._visible and time.monotonic() - self._told >= PROGRESS_S:
            self._told = time.monotonic()
            record = {"step": self._step, "done_bytes": self._done, "num_bytes": self._num_bytes}
            print(json.dumps({"upload_progress": record}), file=sys.stderr, flush=True)


def _download(args: argparse.Namespace) -> dict[str, Any]:
    from keepstep.config.load import load
    from keepstep.preflight.lease import holder
    from keepstep.storage.remote import open_remote

    run = _existing_run(args.run)
    verdict = holder(run, load(str(run.config)).retry)
    if not verdict.open:
        raise HeldError(
            f"{run.root} is held: {verdict.reason}.",
            "It fetches what it needs itself, and clears downloads away.",
        )
    if run.checkpoint(args.step).exists():
        raise CheckpointError(
            f"{run.checkpoint(args.step)} is there already.", f"Verify it: keepstep verify {run.checkpoint(args.step)}"
        )
    remote = open_remote(_configs(run)[0], run)
    try:
        folder = remote.download(args.step, run)
    finally:
        remote.close()
    return {"action": "downloaded", "step": args.step, "path": str(folder)}


def _configs(run: RunDir) -> tuple[S3Config, CheckpointConfig]:
    """Where the checkpoints go and which stay: what the trainer says, else what the run's first start was told."""
    from keepstep.config.load import load
    from keepstep.config.schema import CheckpointConfig, S3Config

    given = os.environ.get(CONFIG_VARIABLE)
    if given is None:
        config = load(str(run.config), [])
        return config.s3, config.checkpoint
    sections = json.loads(given)
    return S3Config.model_validate(sections["s3"]), CheckpointConfig.model_validate(sections["checkpoint"])


def _existing_run(path: str) -> RunDir:
    run = RunDir.at(path)
    if not run.has_record() or not run.config.is_file():
        raise no_run(run, "run.json and config.yaml are not both there")
    return run


def _newest(run: RunDir) -> int:
    steps = run.steps()
    if not steps:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint.", f"See what there is: keepstep ls {run.root}")
    return steps[-1]


def _sentence(record: dict[str, Any]) -> str:
    if record["action"] == "downloaded":
        return f"step {record['step']} is verified and published as {record['path']}"
    return (
        f"step {record['step']} is confirmed in s3://{record['bucket']}/{record['prefix']} "
        f"({record['num_uploaded']} files uploaded, {record['num_present']} were there, {record['num_bytes']} bytes)"
    )


def _yield_the_disk() -> None:
    """I/O priority "idle" for this process and the threads that it starts; where it cannot be set, it stays."""
    syscall = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if sys.platform == "linux" and syscall is not None:
        import ctypes

        who_process, this_one, class_idle = 1, 0, 3 << 13
        ctypes.CDLL(None, use_errno=True).syscall(syscall, who_process, this_one, class_idle)


def _leave_with_parent() -> None:
    """Leave when standard input ends, which is when the parent died: SIGINT first, so that open uploads are aborted."""
    # A parent that starts its children in the background may have SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        # Not sys.stdin: a thread that waits inside its buffer's lock makes the interpreter abort at exit.
        while os.read(0, 4096):
            pass
        timer = threading.Timer(ABORT_S, os._exit, (EXIT_FAILED,))
        timer.daemon = True
        timer.start()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()
