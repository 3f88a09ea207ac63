"""`keepstep upload RUN [--step N]` (also the trainer's uploader process) and `keepstep download RUN --step N`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from keepstep.attempts import check_fence
from keepstep.errors import EXIT_DONE, EXIT_FAILED, CheckpointError, ConfigError, KeepstepError
from keepstep.events.log import utc_now
from keepstep.run import RunDir, write_json

ABORT_S = 12.0
S3_CONFIG_VARIABLE = "KEEPSTEP_S3_CONFIG_JSON"


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
    from keepstep.storage.remote import open_remote, upload_checkpoint

    run = _existing_run(args.run)
    step = args.step if args.step is not None else _newest(run)
    attempt: int | None = getattr(args, "attempt", None)
    remote = open_remote(_store_config(run), run)
    try:
        fence = (lambda: check_fence(run, attempt)) if attempt is not None else (lambda: None)
        report = upload_checkpoint(remote, run, step, attempt, fence)
        fence()
    finally:
        remote.close()
    record = {
        "step": step,
        "time": utc_now(),
        "num_bytes": report.num_bytes,
        "bucket": remote.bucket,
        "prefix": remote.prefix,
    }
    write_json(run.upload(step), record)
    return {"action": "uploaded", **record, "num_uploaded": report.num_uploaded, "num_present": report.num_present}


def _download(args: argparse.Namespace) -> dict[str, Any]:
    from keepstep.storage.remote import open_remote

    run = _existing_run(args.run)
    if run.checkpoint(args.step).exists():
        raise CheckpointError(
            f"{run.checkpoint(args.step)} is there already.", f"Verify it: keepstep verify {run.checkpoint(args.step)}"
        )
    remote = open_remote(_store_config(run), run)
    try:
        folder = remote.download(args.step, run)
    finally:
        remote.close()
    return {"action": "downloaded", "step": args.step, "path": str(folder)}


def _store_config(run: RunDir) -> Any:
    """Where the run's checkpoints go: what the trainer says, else what the run's first start was told."""
    from keepstep.config.load import load
    from keepstep.config.schema import S3Config

    given = os.environ.get(S3_CONFIG_VARIABLE)
    return S3Config.model_validate_json(given) if given else load(str(run.config), []).s3


def _existing_run(path: str) -> RunDir:
    run = RunDir.at(path)
    if not run.has_record() or not run.config.is_file():
        raise ConfigError(f"{run.root} is not the folder of a run: run.json and config.yaml are not both there.")
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
