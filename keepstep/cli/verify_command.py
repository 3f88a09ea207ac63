"""`keepstep verify`: are these checkpoints whole?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from keepstep.checkpoint import layout, verl_layout
from keepstep.checkpoint.files import printable
from keepstep.checkpoint.verify import UNVERIFIED, VERIFIED, WEIGHTS_ONLY, Verdict, verify
from keepstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, ConfigError, KeepstepError
from keepstep.run import RunDir, parse_step

S3_PREFIX = "s3://"

QUICK_WORDS = {
    VERIFIED: "sizes and headers agree (quick: the content was not read)",
    UNVERIFIED: "structure is whole (quick: the content was not read)",
    WEIGHTS_ONLY: "weights_only (quick: the content was not read)",
}
"""What a quick look may say of a good one: never the word of a full verification."""


def main(args: argparse.Namespace) -> int:
    """0: all are good, 1: one is bad, 2: one is not there or no checkpoint's address, 6: the store did not answer."""
    verdicts: list[Verdict] = []
    errors: list[KeepstepError] = []
    records = []
    for path in args.paths:
        try:
            if args.quick and path.startswith(S3_PREFIX):
                raise ConfigError(f"--quick is for checkpoints on a disk, not for {printable(path)}.", "Leave it out.")
            verdict = _verify_remote(path) if path.startswith(S3_PREFIX) else _verify_local(path, args.quick)
        except KeepstepError as error:
            errors.append(error)
            records.append({"path": printable(path, 4096), "error": error.message, "remedy": error.remedy})
            print(f"keepstep: {error}", file=sys.stderr)
            continue
        verdicts.append(verdict)
        records.append(verdict.to_record())
        if not args.json:
            _print_verdict(verdict)
    if args.json:
        print(json.dumps(records[0] if len(records) == 1 else records))
    codes = {error.exit_code for error in errors}
    if codes:
        return EXIT_USAGE if EXIT_USAGE in codes else codes.pop()
    return EXIT_DONE if all(verdict.ok for verdict in verdicts) else EXIT_FAILED


def _verify_local(path: str, quick: bool) -> Verdict:
    """
    Raises:
        ConfigError: nothing is there, or what is there holds checkpoints and is none.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(f"{printable(path)} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"{printable(path)} cannot be read ({error.strerror}).") from error
    if holder := _holds_checkpoints(Path(path)):
        raise holder
    return verify(Path(path), quick=quick)


def _holds_checkpoints(path: Path) -> ConfigError | None:
    """The error for a run's folder, its checkpoints/, or verl's folder of steps: which one of them is meant?"""
    if not os.path.isdir(path) or os.path.lexists(path / layout.MANIFEST):
        return None
    run = RunDir.at(path)
    if run.has_record():
        return ConfigError(
            f"{printable(str(path))} is a run's folder, not a checkpoint.",
            f"Verify one of its steps: keepstep verify {run.latest_link}, or {run.checkpoint(0).parent}/step_N",
        )
    for parse, name in ((parse_step, "step_"), (verl_layout.parse_step, "global_step_")):
        steps = _steps_in(path, parse)
        if steps:
            return ConfigError(
                f"{printable(str(path))} holds checkpoints and is none.",
                f"Verify one of them: keepstep verify {path / f'{name}{max(steps)}'}",
            )
    return None


def _steps_in(path: Path, parse: Callable[[str], int | None]) -> list[int]:
    try:
        with os.scandir(path) as entries:
            found = [parse(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [step for step in found if step is not None]


def _verify_remote(address: str) -> Verdict:
    """The objects of `s3://bucket/prefix/checkpoints/step_<N>` against their manifest.

    Raises:
        ConfigError: not such an address, or nothing is there.
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
            raise ConfigError(f"{address} does not exist.")
        return RemoteRun(store, bucket, prefix).verify(step)


def _print_verdict(verdict: Verdict) -> None:
    """Good ones to standard output, others with their reasons to standard error."""
    path = printable(str(verdict.path), 4096)
    word = QUICK_WORDS.get(verdict.state, verdict.state) if verdict.quick else verdict.state
    output = sys.stdout if verdict.ok else sys.stderr
    facts = [] if verdict.step is None else [f"step {verdict.step}"]
    facts += [] if verdict.epoch is None else [f"epoch {verdict.epoch}"]
    facts += [f"{verdict.num_bytes} bytes"]
    if verdict.read_from and verdict.seconds:
        facts += [f"{verdict.num_bytes / verdict.seconds / 1e9:.2f} GB/s", f"read from {verdict.read_from}"]
    print(f"{path}: {word}" + (f" ({', '.join(facts)})" if verdict.ok else ""), file=output)
    for line in [*verdict.reasons, *verdict.notes]:
        print(f"  {line}", file=output)
