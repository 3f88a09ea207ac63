"""`keepstep dataset check`: rows from the footers against a run's record, a log or a number."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from keepstep.errors import EXIT_DATA, EXIT_DONE, ConfigError

# Our own line, and the two that verl writes.
_COUNT = re.compile(r"(?:Loaded train dataset: (\d+) rows|(?:filter )?dataset len: (\d+))")


def check(args: argparse.Namespace) -> int:
    """0: the rows are the expected ones, 4: they are not."""
    from keepstep.data.count import count_rows
    from keepstep.data.spec import resolve_files
    from keepstep.run import RunDir

    files = resolve_files(args.files, RunDir.at(args.run or "."))
    counted = count_rows(files, full=args.full)
    found = sum(record.rows for record in counted)
    problems, expected = _compare(args, counted, found)
    if args.json:
        report: dict[str, Any] = {"files": [record.to_record() for record in counted], "num_rows": found}
        print(json.dumps(report | {"expected": expected, "problems": problems}))
    else:
        for record in counted:
            print(f"{record.rows:>12} rows  {record.path}")
        print(f"{found:>12} rows in {len(counted)} files" + (f", expected {expected}" if expected is not None else ""))
        for problem in problems:
            print(f"  {problem}")
    return EXIT_DATA if problems else EXIT_DONE


def _compare(args: argparse.Namespace, counted: list[Any], found: int) -> tuple[list[str], int | None]:
    """(problems, the expected number of rows)."""
    from keepstep.cli.inspect_commands import existing_run
    from keepstep.data import record
    from keepstep.run import read_json

    if args.run:
        recorded = read_json(existing_run(args.run).record)["dataset"]
        now = record.build(counted, []) | {"val_files": recorded["val_files"]}
        return record.compare(recorded, now), recorded["num_rows"]
    expected = args.expect_rows if args.log is None else _logged_rows(Path(args.log))
    if expected is None or expected == found:
        return [], expected
    names = ", ".join(entry.path for entry in counted)
    return [f"{names}: {found} rows, expected {expected}"], expected


def _logged_rows(log: Path) -> int:
    """The last count of training rows that a log names."""
    if not log.is_file():
        raise ConfigError(f"--log: {log} is not a file.", "Give the train.log of the run.")
    counts = [int(first or second) for first, second in _COUNT.findall(log.read_text(errors="replace"))]
    if not counts:
        raise ConfigError(f"--log: {log} names no count.", "It needs a line `Loaded train dataset: N rows`.")
    return counts[-1]
