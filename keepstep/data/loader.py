"""Parquet rows as prompts: read, capped, put through the chat template, tokenised, filtered."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from keepstep.config.schema import DataConfig
from keepstep.data.row_digest import RowDigest
from keepstep.data.spec import open_file
from keepstep.errors import DataError, first_line

REWARD_MODEL, GROUND_TRUTH, EXTRA_INFO = "reward_model", "ground_truth", "extra_info"
_TOKENIZE_BATCH = 1000
_READ_BATCH = 4096

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Row:
    """One prompt. `index` counts rows of all files in their order, before any filter."""

    index: int
    prompt_ids: list[int]
    prompt_text: str
    data_source: Any
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Rows that cap and filter left, in the order of the files."""

    rows: list[Row]
    num_raw_rows: int
    """Rows of the files, before cap and filter."""
    rows_sha256: str
    """Digest of all rows of the files (`row_digest`)."""

    @classmethod
    def load(cls, files: Sequence[str], config: DataConfig, tokenizer: Any, *, split: Split, seed: int) -> Dataset:
        """Read, draw the capped number of rows, tokenise, filter.

        Args:
            tokenizer: a Hugging Face tokenizer; its chat template is used where it has one.
            seed: the run's; with `split` it says which rows a cap leaves.

        Raises:
            DataError: a file cannot be read, lacks a column, has a prompt of another form; prompts are over
                `max_prompt_length` and not to be filtered; no row is left.
        """
        # numpy, and not for those who only look.
        from keepstep.data.order import subset

        digest = RowDigest()
        tables = [(file, _read_table(file, config, digest)) for file in files]
        cap = config.train_max_samples if split == "train" else config.val_max_samples
        indices = subset(digest.num_rows, cap, seed=seed, split=split, shuffle=config.shuffle)
        records = list(_records(tables, indices, config))
        texts = [_render(record.prompt, tokenizer, record) for record in records]
        rows = [
            Row(index, ids, text, record.data_source, record.ground_truth, record.extra_info)
            for index, record, text, ids in zip(indices, records, texts, _tokenize(texts, tokenizer), strict=True)
        ]
        return cls(_filter(rows, config, files), digest.num_rows, digest.hexdigest())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Row:
        return self.rows[position]

    @cached_property
    def row_ids_sha256(self) -> str:
        """Digest of the kept rows' indices and prompt tokens: cap, filter, tokenizer and template all change it."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(array("q", [row.index, len(row.prompt_ids), *row.prompt_ids]).tobytes())
        return digest.hexdigest()

    def usage(self) -> dict[str, Any]:
        """What run.json keeps of it (`record.compare_usage`)."""
        return {"rows": len(self), "row_ids_sha256": self.row_ids_sha256, "rows_sha256": self.rows_sha256}


@dataclass(frozen=True)
class _Record:
    """One parquet row and where it stands."""

    file: str
    number: int
    prompt: Any
    data_source: Any
    ground_truth: Any
    extra_info: dict[str, Any]


def _records(tables: list[tuple[str, Any]], indices: list[int], config: DataConfig) -> Iterator[_Record]:
    """The rows with these indices, which count those of all tables and rise."""
    import pyarrow

    first = 0
    at = iter(indices)
    index = next(at, None)
    for file, table in tables:
        numbers = []
        while index is not None and index < first + table.num_rows:
            numbers.append(index - first)
            index = next(at, None)
        chosen = table if len(numbers) == table.num_rows else table.take(pyarrow.array(numbers, pyarrow.int64()))
        for number, row in zip(numbers, chosen.to_pylist(), strict=True):
            yield _record(file, number, row, config)
        first += table.num_rows


def _record(file: str, number: int, row: dict[str, Any], config: DataConfig) -> _Record:
    reward_model = row[REWARD_MODEL]
    if not isinstance(reward_model, dict) or GROUND_TRUTH not in reward_model:
        raise DataError(f"{file}: row {number} has no {REWARD_MODEL}.{GROUND_TRUTH}.")
    return _Record(
        file,
        number,
        row[config.prompt_key],
        row[config.reward_fn_key],
        reward_model[GROUND_TRUTH],
        row.get(EXTRA_INFO) or {},
    )


def _read_table(file: str, config: DataConfig, digest: RowDigest) -> Any:
    """The columns that are used, of all rows; the digest takes in every column."""
    import pyarrow
    import pyarrow.parquet

    required = [config.prompt_key, config.reward_fn_key, REWARD_MODEL]
    try:
        with open_file(file) as handle:
            parquet = pyarrow.parquet.ParquetFile(handle)
            there = parquet.schema_arrow.names
            missing = [column for column in required if column not in there]
            if not missing:
                used = [column for column in (*required, EXTRA_INFO) if column in there]
                batches = []
                for batch in parquet.iter_batches(batch_size=_READ_BATCH):
                    digest.update(batch)
                    batches.append(batch.select(used))
                if sum(batch.num_rows for batch in batches) != parquet.metadata.num_rows:
                    raise OSError(f"its pages do not hold the {parquet.metadata.num_rows} rows that its footer names")
                schema = pyarrow.schema([parquet.schema_arrow.field(column) for column in used])
                return pyarrow.Table.from_batches(batches, batches[0].schema if batches else schema)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}", "Fetch or write it anew.") from error
    raise DataError(
        f"{file}: column {missing[0]} is missing; it has {', '.join(there)}.",
        "Rename the column, or name it by data.prompt_key or data.reward_fn_key.",
    )


def _render(prompt: Any, tokenizer: Any, record: _Record) -> str:
    """The text that the model continues: by the chat template, or the contents one after the other."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not _are_messages(prompt):
        raise DataError(
            f"{record.file}: row {record.number}: the prompt is neither text nor a list of messages "
            "with role and content."
        )
    if not tokenizer.chat_template:
        return "".join(message["content"] for message in prompt)
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in prompt)
    )


def _tokenize(texts: list[str], tokenizer: Any) -> Iterator[list[int]]:
    # A chat template writes the special tokens itself; a second beginning-of-text token would be a different prompt.
    add_special_tokens = not tokenizer.chat_template
    for first in range(0, len(texts), _TOKENIZE_BATCH):
        part = texts[first : first + _TOKENIZE_BATCH]
        yield from tokenizer(part, add_special_tokens=add_special_tokens)["input_ids"]


def _filter(rows: list[Row], config: DataConfig, files: Sequence[str]) -> list[Row]:
    kept = [row for row in rows if 0 < len(row.prompt_ids) <= config.max_prompt_length]
    dropped = len(rows) - len(kept)
    if dropped and not config.filter_overlong_prompts:
        longest = max(len(row.prompt_ids) for row in rows)
        raise DataError(
            f"{dropped} of {len(rows)} prompts are empty or over data.max_prompt_length={config.max_prompt_length} "
            f"tokens (the longest has {longest}).",
            "Raise data.max_prompt_length, or drop them by data.filter_overlong_prompts=true.",
        )
    if not kept:
        raise DataError(
            f"No row is left of {len(rows)} in {', '.join(files)}: all prompts are over "
            f"data.max_prompt_length={config.max_prompt_length} tokens.",
            "Raise data.max_prompt_length.",
        )
    return kept
