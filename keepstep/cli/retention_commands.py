"""`keepstep prune` and `keepstep pin`: which checkpoints of a run stay."""

from __future__ import annotations

import argparse
import json

from keepstep.attempts import check_fence, claim
from keepstep.checkpoint.history import uploaded_steps, verified_steps
from keepstep.checkpoint.inventory import decide_for, retire, waiting_steps
from keepstep.cli.inspect_commands import existing_run
from keepstep.config.load import load
from keepstep.errors import EXIT_DONE, CheckpointError, HeldError
from keepstep.events.log import EventLog
from keepstep.run import RunDir, read_json


def prune(args: argparse.Namespace) -> int:
    """Delete the checkpoints on disk that no rule keeps; `--dry-run` says which and why, and deletes nothing.

    Raises:
        HeldError: an attempt is at work, which does this itself after each save.
    """
    run = existing_run(args.run)
    config = load(str(run.config))
    newest = max(run.attempt_numbers(), default=0)
    verdict = claim(run, newest, config.retry.lease_timeout_s)
    if not verdict.open and not args.dry_run:
        raise HeldError(
            f"{run.root} is held: {verdict.reason}.", "It retires checkpoints itself after each save; see --dry-run."
        )
    record = read_json(run.record)
    decision = decide_for(
        run,
        config.checkpoint,
        run_id=record["run_id"],
        verified=verified_steps(run),
        waiting=frozenset(waiting_steps(config, run, record["contract"]["trainer.total_training_steps"])),
        in_use=frozenset(),
    )
    if not args.dry_run and decision.deleted:
        events = EventLog(run.events, newest)
        retire(
            run, decision, lambda: check_fence(run, newest),
            lambda step, reason: events.emit("checkpoint_pruned", step=step, reason=reason),
        )  # fmt: skip
        events.close()
    if args.json:
        kept = {str(step): reasons for step, reasons in decision.kept.items()}
        deleted = {str(step): reason for step, reason in decision.deleted.items()}
        print(json.dumps({"run": str(run.root), "dry_run": args.dry_run, "kept": kept, "deleted": deleted}))
        return EXIT_DONE
    lines = {step: f"step_{step:<8} stays: {', '.join(reasons)}" for step, reasons in decision.kept.items()}
    verb = "would go" if args.dry_run else "deleted"
    lines |= {step: f"step_{step:<8} {verb}: {reason}" for step, reason in decision.deleted.items()}
    print("\n".join(lines[step] for step in sorted(lines)) or f"{run.root}: no verified checkpoint on disk")
    return EXIT_DONE


def pin(args: argparse.Namespace) -> int:
    """Keep a step for ever, or with `--remove` no longer.

    Raises:
        CheckpointError: the run has no such step.
    """
    run = existing_run(args.run)
    if args.remove:
        run.pin(args.step).unlink(missing_ok=True)
        run.pins.mkdir(exist_ok=True)
        # For the store, which may have been told of the pin.
        run.unpin(args.step).touch()
        print(f"step {args.step} is no longer pinned")
        return EXIT_DONE
    if not run.checkpoint(args.step).is_dir() and args.step not in uploaded_steps(run):
        raise CheckpointError(f"{run.root} has no step {args.step}.", f"See what it has: keepstep ls {run.root}")
    _create(run, args.step)
    print(f"step {args.step} is pinned: no rule deletes it")
    return EXIT_DONE


def _create(run: RunDir, step: int) -> None:
    run.pins.mkdir(exist_ok=True)
    run.pin(step).touch()
    run.unpin(step).unlink(missing_ok=True)
