"""`keepstep tune RUN`: how often to save, from what the run has measured. Light."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from keepstep.cli.inspect_commands import existing_run
from keepstep.config.load import load
from keepstep.errors import EXIT_DONE, ConfigError
from keepstep.events.log import read_jsonl
from keepstep.tuning import Choice, Measured, best, choices, measure

HOUR_S = 3600.0
RESTART_S = 120.0
"""Taken for a run that was never restarted."""


def main(args: argparse.Namespace) -> int:
    """Print what each interval would cost, and the cheapest.

    Raises:
        ConfigError: RUN is not the folder of a run, has measured nothing yet, or the hours are no positive number.
    """
    run = existing_run(args.run)
    if not args.mtbf_hours > 0:
        raise ConfigError(f"--mtbf-hours {args.mtbf_hours:g}: hours between two kills, more than 0.")
    measured = measure(list(read_jsonl(run.events)), read_jsonl(run.metrics))
    if measured is None:
        raise ConfigError(f"{run.root} has no finished step with a verified checkpoint yet.", "Let it save once.")
    config = load(str(run.config))
    restart_s = RESTART_S if measured.restart_s is None else measured.restart_s
    found = choices(measured, args.mtbf_hours * HOUR_S, restart_s, config.resume.prefer_multiple)
    cheapest = best(found)
    if args.json:
        record = {"measured": asdict(measured), "restart_s": restart_s, "choices": [asdict(one) for one in found]}
        print(json.dumps(record | {"save_freq": cheapest.save_freq}))
    else:
        print("\n".join(describe(measured, restart_s, args.mtbf_hours, found, cheapest, config.trainer.save_freq)))
    return EXIT_DONE


def describe(
    measured: Measured, restart_s: float, mtbf_hours: float, found: list[Choice], cheapest: Choice, now: int
) -> list[str]:
    assumed = " (assumed: it was never restarted)" if measured.restart_s is None else ""
    lines = [
        f"a step takes {measured.step_s:.2f} s, a save holds it up for {measured.save_s:.2f} s and is verified after "
        f"{measured.verify_s:.1f} s",
        f"a restart takes {restart_s:.0f} s{assumed}, a kill is expected every {mtbf_hours:g} h",
        "",
        "save_freq   saving   lost to kills   together",
    ]
    for one in found:
        mark = "  <- cheapest" if one == cheapest else "  <- now" if one.save_freq == now else ""
        lines.append(f"{one.save_freq:9d} {one.saving:8.2%} {one.losing:15.2%} {one.total:10.2%}{mark}")
    return [*lines, "", f"trainer.save_freq={cheapest.save_freq}"]
