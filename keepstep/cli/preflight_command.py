"""`keepstep preflight`: what a start would be refused for, all of it at once, with the way out of each."""

from __future__ import annotations

import argparse
import json

from keepstep.config.load import load
from keepstep.config.schema import RunConfig
from keepstep.platform import servers
from keepstep.preflight.checks import Check, OnNodes, clean, examine, exit_code
from keepstep.processes import ProcessRef
from keepstep.run import RunDir

INDENT = " " * 24


def main(args: argparse.Namespace, overrides: list[str]) -> int:
    """0: a start would go through; else the exit code of the first check that fails."""
    config = load(args.config, overrides)
    ended = clean(RunDir.at(config.trainer.output_dir), config.retry.lease_timeout_s) if args.clean else []
    try:
        checks, _ = examine(config, on_nodes=_nodes(config), heavy=() if args.quick else None, log=args.log)
    finally:
        servers.release(RunDir.at(config.trainer.output_dir).platform, ProcessRef.current("controller"))
    if args.json:
        print(json.dumps({"checks": [check.to_record() for check in checks], "ended": ended}))
        return exit_code(checks)
    for name in ended:
        print(f"ended   {name}")
    for check in checks:
        print("\n".join(lines_of(check)))
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail", "skipped")}
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return exit_code(checks)


def lines_of(check: Check) -> list[str]:
    """A check for people: status, id, sentence; below it what to do."""
    first, *more = check.sentence.splitlines()
    where = f" [{check.node}]" if check.node else ""
    lines = [f"{check.status:<8}{check.id + where:<16}{first}", *(f"{INDENT}{line}" for line in more)]
    return lines + [f"{INDENT}-> {line.strip()}" for line in check.remedy.splitlines() if line.strip()]


def _nodes(config: RunConfig) -> OnNodes | None:
    if config.ray.address is None:
        return None
    from keepstep.controller.nodes import ask_cluster

    return ask_cluster(config)
