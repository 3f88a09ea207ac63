"""`keepstep doctor RUN`: from what a run left to the cause and the way out. Light."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from keepstep.cli.inspect_commands import no_run
from keepstep.doctor.evidence import gather, is_run
from keepstep.doctor.finding import PROBLEM
from keepstep.doctor.rules import Report, examine
from keepstep.errors import EXIT_DONE, EXIT_FAILED
from keepstep.run import RunDir


def main(args: argparse.Namespace) -> int:
    """0: nothing stands in the way, 1: something does.

    Raises:
        ConfigError: RUN is not the folder of a run.
    """
    run = RunDir.at(args.run)
    if not is_run(run):
        raise no_run(run, "it has no run.json and no attempts")
    report = examine(gather(run))
    if args.json:
        findings = [finding.to_record() for finding in report.findings]
        record = {"run": str(run.root), "state": report.state, "healthy": report.healthy, "findings": findings}
        print(json.dumps(record))
    else:
        print("\n".join(describe(report, run)))
    return EXIT_DONE if report.healthy else EXIT_FAILED


def describe(report: Report, run: RunDir) -> Iterator[str]:
    """The report for a person."""
    yield f"{run.root}: {'healthy: ' if report.healthy else ''}{report.state}"
    for finding in report.findings:
        yield ""
        yield f"{'PROBLEM' if finding.severity == PROBLEM else 'note'}  {finding.id}: {finding.cause}"
        for quote in finding.evidence:
            yield f"    {quote}"
        yield f"  do: {finding.remedy}"
