"""`keepstep dataset check`: rows from the footers against a run's record, a log or a number."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import EXIT_DATA, EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from keepstep.data.count import FileRecord
    from keepstep.data.logged import SplitCounts

Record = dict[str, Any]


@dataclass
class Found:
    """Files of one split as they are now."""

    files: list[FileRecord]
    rows_sha256: str | None
    """None: not read deeply."""

    @property
    def num_rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass
class Verdict:
    """What a comparison came to."""

    expected: int | None = None
    against: str = ""
    """What the files were held against."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(args: argparse.Namespace) -> int:
    """0: the rows are the expected ones, or nothing is expected; 4: they are not, or there are none."""
    from keepstep.data.spec import resolve_files
    from keepstep.run import RunDir

    files = resolve_files(args.files, RunDir.at(args.run or "."))
    if args.run:
        found, verdict = _against_run(args, files)
    else:
        found = _look(files, args.deep)
        verdict = _against_log(found, Path(args.log)) if args.log else _against_number(found, args.expect_rows)
    if args.json:
        print(json.dumps(_report(found, verdict)))
    else:
        _print(found, verdict)
    return EXIT_DATA if verdict.problems else EXIT_DONE


def _look(files: list[str], deep: bool) -> Found:
    from keepstep.data.count import count_rows, read_rows

    return Found(*read_rows(files)) if deep else Found(count_rows(files), None)


def _report(found: Found, verdict: Verdict) -> Record:
    return {
        "files": [file.to_record() for file in found.files],
        "num_rows": found.num_rows,
        "rows_sha256": found.rows_sha256,
        "against": verdict.against or None,
        "expected": verdict.expected,
        "problems": verdict.problems,
        "notes": verdict.notes,
    }


def _print(found: Found, verdict: Verdict) -> None:
    for file in found.files:
        print(f"{file.rows:>12} rows  {file.path}")
    count = f"{found.num_rows:>12} rows in {len(found.files)} file" + ("s" if len(found.files) != 1 else "")
    print(count + (f", expected {verdict.expected} by {verdict.against}" if verdict.expected is not None else ""))
    if found.rows_sha256:
        print(f"             SHA-256 of the rows: {found.rows_sha256}")
    for note in verdict.notes:
        print(f"  {note}")
    for problem in verdict.problems:
        print(f"keepstep: {problem}", file=sys.stderr)


def _names(found: Found) -> str:
    paths = [file.path for file in found.files]
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


# A number


def _against_number(found: Found, expected: int | None) -> Verdict:
    if expected is None and found.num_rows == 0:
        return Verdict(None, "", [f"{_names(found)}: no rows, so there is nothing to train on"])
    if expected is None or expected == found.num_rows:
        return Verdict(expected, "--expect-rows")
    problem = f"{_names(found)}: {found.num_rows} rows, expected {expected}"
    return Verdict(expected, "--expect-rows", [problem])


# A log


def _against_log(found: Found, log: Path) -> Verdict:
    from keepstep.data.logged import counts_in

    if not log.is_file():
        raise ConfigError(f"--log: {log} is not a file.", "Give the train.log of the run.")
    counts = counts_in(log.read_text(errors="replace"))
    if counts.ambiguous:
        raise ConfigError(f"--log: {log}: {counts.ambiguous}.", "Give the number that you mean: --expect-rows N.")
    if not counts.names_any():
        raise ConfigError(
            f"--log: {log} names no count of rows.",
            "It needs a line `Loaded train dataset: N rows`, or verl's `dataset len: N`.",
        )
    return compare_logged(found, counts.train, counts.val, str(log))


def compare_logged(found: Found, train: SplitCounts, val: SplitCounts, log: str) -> Verdict:
    """The files, which are taken for the training files, against the last counts of a log. Pure."""
    rows, names = found.num_rows, _names(found)
    if train.raw is None:
        return _against_filtered(found, train.filtered, log)
    verdict = Verdict(train.raw, f"the training rows that {log} names")
    if rows == train.raw:
        return verdict
    sentence = f"{names}: {rows} rows, expected {train.raw} (the training rows of the last start in {log})"
    if rows == val.raw:
        sentence += f"; {rows} are its validation rows: these are held against --expect-rows {rows}"
    elif val.raw is not None and rows == train.raw + val.raw:
        sentence += "; it is the training and the validation rows together: give the training files alone"
    elif rows == train.filtered:
        sentence += f"; {rows} were left after its filter: are these files already filtered?"
    verdict.problems.append(sentence)
    return verdict


def _against_filtered(found: Found, filtered: int | None, log: str) -> Verdict:
    """A count after the filter is no count of files: it can only be too large for them."""
    if filtered is None:
        raise ConfigError(
            f"--log: {log} names validation rows only, no training rows.",
            "Give the number that you mean: --expect-rows N.",
        )
    if found.num_rows < filtered:
        sentence = (
            f"{_names(found)}: {found.num_rows} rows, and {log} says that {filtered} were left after its filter: "
            "rows are missing"
        )
        return Verdict(None, "", [sentence])
    return Verdict(notes=[
        f"{log} names training rows after the filter only ({filtered}), which are not the rows of the files "
        f"({found.num_rows}): nothing contradicts them, and nothing proves that they are the same"
    ])  # fmt: skip


# A run


def _against_run(args: argparse.Namespace, files: list[str]) -> tuple[Found, Verdict]:
    """Against run.json; a file that it names for validation is held against the validation files."""
    from keepstep.checkpoint.history import rows_handed_out
    from keepstep.cli.inspect_commands import existing_run
    from keepstep.data import record
    from keepstep.run import read_json

    run = existing_run(args.run)
    recorded = read_json(run.record)["dataset"]
    train_paths, val_paths = ({file["path"] for file in recorded[key]} for key, _ in record.SPLITS)
    val_files = [file for file in files if file in val_paths and file not in train_paths]
    train_files = [file for file in files if file not in val_files]
    train, val = _look(train_files, args.deep), _look(val_files, args.deep)
    # What was not asked about is as it was recorded.
    now = {
        "num_rows": train.num_rows if train_files else recorded["num_rows"],
        "files": [file.to_record() for file in train.files] if train_files else recorded["files"],
        "val_files": [file.to_record() for file in val.files] if val_files else recorded["val_files"],
        "schemas": record.schemas_of([*train.files, *val.files]),
    }
    verdict = Verdict(
        (recorded["num_rows"] if train_files else 0)
        + (sum(file["rows"] for file in recorded["val_files"]) if val_files else 0),
        f"the record of {run.root}",
        record.compare(recorded, now),
        record.notes(recorded, now),
    )
    consumed = rows_handed_out(run)
    if consumed and record.compare(recorded, now | {"val_files": recorded["val_files"]}):
        verdict.notes.append(record.explain_position(recorded, now, consumed))
    for split, found in (("train", train), ("val", val)):
        if found.files and found.rows_sha256 and not verdict.problems:
            _compare_digest(split, found.rows_sha256, recorded.get("used", {}), verdict)
    digest = train.rows_sha256 if not val_files else val.rows_sha256 if not train_files else None
    return Found([*train.files, *val.files], digest), verdict


def _compare_digest(split: str, found: str, used: Record, verdict: Verdict) -> None:
    expected = used.get(split, {}).get("rows_sha256")
    if expected is None:
        verdict.notes.append(f"{split}: the run has recorded no SHA-256 of its rows yet: only footers were compared")
    elif expected != found:
        verdict.problems.append(
            f"{split}: footers and counts are the same, the rows are not: SHA-256 {expected} expected, {found} found"
        )
