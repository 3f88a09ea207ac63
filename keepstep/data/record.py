"""The data set as the run recorded it at its first start, and what is different now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.data.count import FileRecord
from keepstep.data.offset import explain
from keepstep.errors import DataError

Record = dict[str, Any]
SPLITS = (("files", "training"), ("val_files", "validation"))
"""(key in the record, name in sentences)."""
_MAX_NAMED = 5


def build(train: Sequence[FileRecord], val: Sequence[FileRecord]) -> Record:
    """The data set's part of run.json. `num_rows` are the training rows of all files, before any cap or filter.

    Raises:
        DataError: there are no training rows.
    """
    num_rows = sum(file.rows for file in train)
    if num_rows == 0:
        names = ", ".join(file.path for file in train) or "none is named"
        raise DataError(f"The training files hold no rows: {names}.", "Check data.train_files.")
    return {
        "num_rows": num_rows,
        "files": [file.to_record() for file in train],
        "val_files": [file.to_record() for file in val],
        "schemas": schemas_of([*train, *val]),
    }


def schemas_of(files: Sequence[FileRecord]) -> dict[str, dict[str, str]]:
    """Columns with their types, once per schema, by the digest that the files' records name."""
    return {file.schema_sha256: dict(file.columns) for file in files if file.columns}


def compare(recorded: Record, found: Record, *, consumed: int | None = None) -> list[str]:
    """Differences, one sentence each: the file, what was expected, what was found.

    Content decides, in the order of the files: a file that moved with its bytes is the same file (`notes` says so).

    Args:
        consumed: training rows that the run has handed out (`train_dataset_offset` of its newest checkpoint): the
            differences are followed by what that position would mean in the data found.
    """
    found_by_split = {
        key: _compare_files(name, recorded.get(key, []), found.get(key, []), _schemas(recorded, found))
        for key, name in SPLITS
    }
    differences = [difference for of_split in found_by_split.values() for difference in of_split]
    if consumed and found_by_split["files"]:
        differences.append(explain_position(recorded, found, consumed))
    return differences


def explain_position(recorded: Record, found: Record, consumed: int) -> str:
    """What the run's position would mean in the data found.

    It counts rows that are left after cap and filter; of the data found only the raw count is known.
    """
    kept = recorded.get("used", {}).get("train", {}).get("rows", recorded["num_rows"])
    sentence = explain(consumed, num_rows_then=kept, num_rows_now=found["num_rows"])
    return sentence + ("; the rows found are counted before cap and filter" if kept != recorded["num_rows"] else "")


def notes(recorded: Record, found: Record) -> list[str]:
    """What is no difference and worth a word: the same content under another path."""
    return [
        f"{name}: {then['path']} is the same file at {now['path']} now"
        for key, name in SPLITS
        for then, now in zip(recorded.get(key, []), found.get(key, []), strict=False)
        if _content(then) == _content(now) and then["path"] != now["path"]
    ]


def compare_usage(recorded: Record, found: Record) -> list[str]:
    """Differences between what the run trained on so far and what this start would, one sentence each.

    Args:
        recorded: run.json's `dataset.used`, by split; a split that is not in it is not compared.
        found: the same of this start (`Dataset.usage`).
    """
    return [
        sentence
        for split in ("train", "val")
        if split in recorded and split in found
        for sentence in _compare_split_usage(split, recorded[split], found[split])
    ]


def _compare_split_usage(split: str, then: Record, now: Record) -> list[str]:
    if then["rows_sha256"] != now["rows_sha256"]:
        return [
            f"{split}: the files hold other rows, though their footers are the same: SHA-256 of the rows "
            f"{then['rows_sha256']} expected, {now['rows_sha256']} found; answers or other columns were changed, or "
            "bytes were damaged"
        ]
    if (then["rows"], then["row_ids_sha256"]) == (now["rows"], now["row_ids_sha256"]):
        return []
    return [
        f"{split}: {then['rows']} rows are used with SHA-256 of row numbers and prompt tokens "
        f"{then['row_ids_sha256']}; now {now['rows']} rows with {now['row_ids_sha256']}. The files are the same: "
        f"data.{split}_max_samples, data.max_prompt_length, the tokenizer, its chat template or the version of "
        "transformers was changed"
    ]


def _schemas(recorded: Record, found: Record) -> dict[str, dict[str, str]]:
    return recorded.get("schemas", {}) | found.get("schemas", {})


def _path(file: Record) -> str:
    return str(file["path"])


def _content(file: Record) -> tuple[Any, ...]:
    return file["rows"], file["bytes"], file["footer_sha256"]


def _compare_files(name: str, then: list[Record], now: list[Record], schemas: dict[str, dict[str, str]]) -> list[str]:
    contents_then, contents_now = [_content(file) for file in then], [_content(file) for file in now]
    paths_then, paths_now = [file["path"] for file in then], [file["path"] for file in now]
    # Shards of one shape may have equal footers: their paths tell an exchange.
    swapped = paths_then != paths_now and sorted(paths_then) == sorted(paths_now)
    if contents_then == contents_now and not swapped:
        return []
    if sorted(contents_then) == sorted(contents_now):
        return [
            f"{name}: the same {len(then)} files in another order, and the order of the rows depends on it: "
            f"{_names(then)} expected, {_names(now)} found"
        ]
    pairs, gone, new = _pair(then, now)
    differences = [sentence for a, b in pairs if (sentence := _compare_file(a, b, schemas)) is not None]
    if gone or new:
        differences += [
            f"{name}: {file['path']} ({file['rows']} rows) is not among the files any more" for file in gone
        ]
        differences += [f"{name}: {file['path']} ({file['rows']} rows) was added" for file in new]
        differences.append(f"{name}: {_count(then)} expected ({_names(then)}), {_count(now)} found ({_names(now)})")
    return differences


def _pair(then: list[Record], now: list[Record]) -> tuple[list[tuple[Record, Record]], list[Record], list[Record]]:
    """(files that belong together, those that are gone, those that are new): by path, by content, then by position."""
    pairs: list[tuple[Record, Record]] = []
    gone, new = then, now
    for key in (_path, _content):
        waiting: dict[Any, list[Record]] = {}
        for file in reversed(new):
            waiting.setdefault(key(file), []).append(file)
        left = []
        for file in gone:
            matches = waiting.get(key(file))
            if matches:
                pairs.append((file, matches.pop()))
            else:
                left.append(file)
        matched = {id(match) for _, match in pairs}
        gone, new = left, [file for file in new if id(file) not in matched]
    if len(gone) == len(new):
        pairs, gone, new = pairs + list(zip(gone, new, strict=True)), [], []
    return pairs, gone, new


def _compare_file(then: Record, now: Record, schemas: dict[str, dict[str, str]]) -> str | None:
    if _content(then) == _content(now):
        return None
    name = now["path"] + ("" if then["path"] == now["path"] else f" (in place of {then['path']})")
    columns = _compare_columns(then, now, schemas)
    if then["rows"] != now["rows"]:
        change = abs(now["rows"] - then["rows"])
        more = "more" if now["rows"] > then["rows"] else "fewer"
        return f"{name}: {then['rows']} rows expected, {now['rows']} found: {change} {more}" + (
            f", and other columns: {columns}" if columns else ""
        )
    if columns:
        return f"{name}: {then['rows']} rows as expected, other columns found: {columns}"
    if then["bytes"] != now["bytes"]:
        return (
            f"{name}: {then['rows']} rows as expected, but {then['bytes']} bytes expected, {now['bytes']} found: "
            "it was written anew or holds other rows"
        )
    return (
        f"{name}: {then['rows']} rows in the same number of bytes, but other content: footer SHA-256 "
        f"{then['footer_sha256'][:12]}… expected, {now['footer_sha256'][:12]}… found"
    )


def _compare_columns(then: Record, now: Record, schemas: dict[str, dict[str, str]]) -> str:
    """Columns that differ; empty: none, or a record of an older release that does not name them."""
    digests = then.get("schema_sha256"), now.get("schema_sha256")
    if None in digests or digests[0] == digests[1]:
        return ""
    before, after = (schemas.get(str(digest), {}) for digest in digests)
    changes = [f"{name} is missing" for name in before if name not in after]
    changes += [f"{name} is new" for name in after if name not in before]
    changes += [
        f"{name} is {after[name]}, was {kind}" for name, kind in before.items() if after.get(name, kind) != kind
    ]
    return ", ".join(changes) or "the same ones in another order"


def _count(files: list[Record]) -> str:
    return f"{len(files)} file{'s' if len(files) != 1 else ''} with {sum(file['rows'] for file in files)} rows"


def _names(files: list[Record]) -> str:
    return ", ".join(file["path"] for file in files[:_MAX_NAMED]) + (", …" if len(files) > _MAX_NAMED else "") or "none"
