"""`keepstep ls` and `plan`: light commands that only look."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.plan import RemoteIndex, plan
from keepstep.checkpoint.verify import VERIFIED, Verdict
from keepstep.errors import EXIT_DONE, ConfigError
from keepstep.run import RunDir, read_json


def ls_command(args: argparse.Namespace) -> int:
    """One line per checkpoint: what is on disk, whether it was verified, whether the store has confirmed it."""
    run = existing_run(args.run)
    with _store_side(run, args.remote) as store:
        uploaded = set(store.steps())
    verified, on_disk = verified_steps(run), set(run.steps())
    latest, best = (run.pointed_at(link) for link in (run.latest_link, run.best_link))
    pinned = run.pinned_steps()
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "on_disk": step in on_disk,
            "verified": step in verified,
            "uploaded": step in uploaded,
            "pinned": step in pinned,
            "latest": step == latest,
            "best": step == best,
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
        marks += ["pinned"] if row["pinned"] else []
        names = " and ".join(name for name in ("latest", "best") if row[name])
        print(f"step_{row['step']:<8} {', '.join(marks)}{f'  <- {names}' if names else ''}")
    for name in quarantined:
        print(f"quarantine/{name}")
    if not rows:
        print(f"{run.root}: no checkpoint yet", file=sys.stderr)
    return EXIT_DONE


def _resume_settings(run: RunDir) -> dict[str, Any]:
    """The `resume` section of the run's own, resolved config.yaml."""
    import yaml

    try:
        found: dict[str, Any] = yaml.safe_load(run.config.read_text(encoding="utf-8"))["resume"]
        if {"policy", "prefer_multiple", "max_rewind_steps"} <= found.keys():
            return found
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        pass
    # Not as it was written: the schema, which takes half of this command's time to import, says what is wrong.
    from keepstep.config.load import load

    return load(str(run.config)).resume.model_dump()


def plan_command(args: argparse.Namespace) -> int:
    """The resume decision from what is on disk and what the store has confirmed, or with `--remote` holds now."""
    run = existing_run(args.run)
    record = read_json(run.record)
    resume = _resume_settings(run)
    with _store_side(run, args.remote) as store:
        found = plan(
            run,
            policy=resume["policy"],
            prefer_multiple=resume["prefer_multiple"],
            max_rewind_steps=resume["max_rewind_steps"],
            remote=store,
            expected_run_id=record["run_id"],
            final_step=record.get("contract", {}).get("trainer.total_training_steps"),
        )
    print(json.dumps(found.to_record()) if args.json else "\n".join(found.describe()))
    return EXIT_DONE


def existing_run(path: str) -> RunDir:
    """
    Raises:
        ConfigError: it is none; with the runs that are in it.
    """
    run = RunDir.at(path)
    if not run.has_record():
        raise no_run(run, "it has no run.json")
    return run


def no_run(run: RunDir, why: str) -> ConfigError:
    """What is said of a folder that is not a run's, with the runs that are in it."""
    inside = sorted(record.parent.name for record in run.root.glob("*/run.json"))
    remedy = f"Runs in it: {', '.join(inside)}." if inside else "Give the run's trainer.output_dir."
    return ConfigError(
        f"{run.root} is not the folder of a run: {why if run.root.is_dir() else 'it does not exist'}.", remedy
    )


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
