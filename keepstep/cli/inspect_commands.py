"""`keepstep verify`, `ls` and `plan`: light commands that only look."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.plan import RemoteIndex, plan
from keepstep.checkpoint.verify import VERIFIED, Verdict, verify
from keepstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, ConfigError
from keepstep.run import RunDir, parse_step, read_json

S3_PREFIX = "s3://"


def verify_command(args: argparse.Namespace) -> int:
    """Verify checkpoints. 0: all good, 1: one is bad, 2: one is not there."""
    status = EXIT_DONE
    verdicts = []
    for path in args.paths:
        verdict = _verify_remote(path) if path.startswith(S3_PREFIX) else _verify_local(Path(path), args.quick)
        if verdict is None:
            print(f"keepstep: {path} does not exist.", file=sys.stderr)
            status = EXIT_USAGE
            continue
        verdicts.append(verdict)
        if not verdict.ok and status == EXIT_DONE:
            status = EXIT_FAILED
    if args.json:
        records = [verdict.to_record() for verdict in verdicts]
        print(json.dumps(records[0] if len(args.paths) == 1 and records else records))
    else:
        for verdict in verdicts:
            _print_verdict(verdict, args.quick)
    return status


def ls_command(args: argparse.Namespace) -> int:
    """One line per checkpoint: what is on disk, whether it was verified, whether the store has confirmed it."""
    run = existing_run(args.run)
    with _store_side(run, args.remote) as store:
        uploaded = set(store.steps())
    verified, on_disk = verified_steps(run), set(run.steps())
    latest = run.latest_text.read_text().strip() if run.latest_text.is_file() else ""
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "on_disk": step in on_disk,
            "verified": step in verified,
            "uploaded": step in uploaded,
            "latest": latest == f"step_{step}",
        }
        for step in sorted(on_disk | uploaded)
    ]
    quarantined = sorted(path.name for path in run.quarantine.iterdir()) if run.quarantine.is_dir() else []
    if args.json:
        print(json.dumps({"run": str(run.root), "checkpoints": rows, "quarantine": quarantined}))
        return EXIT_DONE
    for row in rows:
        marks = [
            "on disk" if row["on_disk"] else "not on disk",
            "verified" if row["verified"] else "not verified here",
            "uploaded" if row["uploaded"] else "not uploaded",
        ]
        print(f"step_{row['step']:<8} {', '.join(marks)}{'  <- latest' if row['latest'] else ''}")
    for name in quarantined:
        print(f"quarantine/{name}")
    if not rows:
        print(f"{run.root}: no checkpoint yet", file=sys.stderr)
    return EXIT_DONE


def plan_command(args: argparse.Namespace) -> int:
    """The resume decision from what is on disk and what the store has confirmed, or with `--remote` holds now."""
    from keepstep.config.load import load

    run = existing_run(args.run)
    resume = load(str(run.config)).resume
    with _store_side(run, args.remote) as store:
        found = plan(
            run,
            policy=resume.policy,
            prefer_multiple=resume.prefer_multiple,
            max_rewind_steps=resume.max_rewind_steps,
            remote=store,
            expected_run_id=read_json(run.record)["run_id"],
        )
    print(json.dumps(found.to_record()) if args.json else "\n".join(found.describe()))
    return EXIT_DONE


def existing_run(path: str) -> RunDir:
    run = RunDir.at(path)
    if not run.has_record():
        raise ConfigError(
            f"{run.root} is not the folder of a run: it has no run.json.", "Give the run's trainer.output_dir."
        )
    return run


@dataclass(frozen=True)
class _Recorded:
    """The store's side of a run as the run recorded it, without asking the store."""

    run: RunDir

    def steps(self) -> list[int]:
        return uploaded_steps(self.run)

    def verify(self, step: int) -> Verdict:
        return Verdict(self.run.upload(step), VERIFIED, [], step)


@contextmanager
def _store_side(run: RunDir, ask: bool) -> Iterator[RemoteIndex]:
    if not ask:
        yield _Recorded(run)
        return
    from keepstep.config.load import load
    from keepstep.storage.remote import open_remote

    with closing(open_remote(load(str(run.config)).s3, run)) as remote:
        yield remote


def _verify_local(path: Path, quick: bool) -> Verdict | None:
    return verify(path, quick=quick) if path.exists() or path.is_symlink() else None


def _verify_remote(address: str) -> Verdict | None:
    """The objects of `s3://bucket/prefix/checkpoints/step_<N>` against their manifest; None: there are none.

    Raises:
        ConfigError: not such an address.
        StorageError: the store did not answer.
    """
    from keepstep.storage.remote import RemoteRun
    from keepstep.storage.s3 import S3Store

    bucket, *folders = address.removeprefix(S3_PREFIX).rstrip("/").split("/")
    step = parse_step(folders[-1]) if len(folders) >= 2 and folders[-2] == "checkpoints" else None
    if not bucket or step is None:
        raise ConfigError(f"{address} is no checkpoint's address.", "Write s3://BUCKET/PREFIX/checkpoints/step_N.")
    prefix = "/".join(folders[:-2])
    with closing(S3Store(bucket, prefix)) as store:
        if not store.list_objects(f"checkpoints/{folders[-1]}/"):
            return None
        return RemoteRun(store, bucket, prefix).verify(step)


def _print_verdict(verdict: Verdict, quick: bool) -> None:
    if verdict.ok:
        rate = "" if quick or not verdict.seconds else f", {verdict.num_bytes / verdict.seconds / 1e9:.2f} GB/s"
        where = f"step {verdict.step}" + (f", epoch {verdict.epoch}" if verdict.epoch is not None else "")
        print(f"{verdict.path}: {verdict.state} ({where}, {verdict.num_bytes} bytes{rate})")
        return
    print(f"{verdict.path}: {verdict.state}", file=sys.stderr)
    for reason in verdict.reasons:
        print(f"  {reason}", file=sys.stderr)
