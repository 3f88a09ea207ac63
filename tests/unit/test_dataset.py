"""Data files: found, counted in a process of their own, recorded, compared, loaded."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from keepstep.config.schema import DataConfig
from keepstep.data import count, record
from keepstep.data.count import FileRecord, count_rows
from keepstep.data.loader import Dataset
from keepstep.data.spec import resolve_files
from keepstep.errors import EXIT_DATA, DataError
from keepstep.run import RunDir


def row(prompt: Any, answer: str = "7") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "data_source": "test/source",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train"},
    }


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def numbers(path: Path, num_rows: int, **options: Any) -> str:
    return write(path, [row(f"{index}+1=") for index in range(num_rows)], **options)


class CharTokenizer:
    """One id per character; the ids of a batch as a Hugging Face tokenizer gives them."""

    def __init__(self, chat_template: str | None = None, begin: int | None = None) -> None:
        self.chat_template = chat_template
        self.begin = begin

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        begin = [self.begin] if add_special_tokens and self.begin is not None else []
        return {"input_ids": [begin + [ord(character) for character in text] for text in texts]}


def settings(**values: Any) -> DataConfig:
    return DataConfig(train_files="unused", **values)


def load(files: list[str], tokenizer: CharTokenizer | None = None, **values: Any) -> Dataset:
    return Dataset.load(files, settings(**values), tokenizer or CharTokenizer())


# Finding files


def test_paths_lists_and_globs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.parquet", "a.parquet", "a.txt", "deep/c.parquet"):
        numbers(tmp_path / name, 1)
    (tmp_path / "d.parquet").mkdir()
    run = RunDir.at(tmp_path / "runs" / "one")
    a, b, c = (str(tmp_path / name) for name in ("a.parquet", "b.parquet", "deep/c.parquet"))
    assert resolve_files(a, run) == [a]
    assert resolve_files([b, a], run) == [b, a]
    assert resolve_files(f"{tmp_path}/*.parquet", run) == [a, b]
    assert resolve_files([c, f"{tmp_path}/?.parquet"], run) == [c, a, b]
    assert resolve_files(f"{tmp_path}/**/*.parquet", run) == [a, b, c]
    monkeypatch.chdir(tmp_path)
    assert resolve_files("deep/c.parquet", run) == [c]


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    path = numbers(tmp_path / "part[0].parquet", 1)
    assert resolve_files(path, RunDir.at(tmp_path / "run")) == [path]


def test_made_data_lies_beside_the_run(tmp_path: Path) -> None:
    made = numbers(tmp_path / ".keepstep" / "made" / "arithmetic" / "train.parquet", 1)
    assert resolve_files("made:arithmetic/train.parquet", RunDir.at(tmp_path / "run")) == [made]


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("no.parquet", "no.parquet does not exist"), ("*.parquet", "no file has such a name"), (".", "is a folder")],
)
def test_what_is_not_there_is_named(tmp_path: Path, pattern: str, part: str) -> None:
    with pytest.raises(DataError, match=part) as caught:
        resolve_files(str(tmp_path / pattern), RunDir.at(tmp_path / "run"))
    assert str(tmp_path) in caught.value.message
    assert caught.value.exit_code == EXIT_DATA


# Counting


def test_count_rows(tmp_path: Path) -> None:
    files = [numbers(tmp_path / "a.parquet", 3), numbers(tmp_path / "b.parquet", 250, row_group_size=100)]
    found = count_rows(files)
    assert [(entry.path, entry.rows, entry.bytes) for entry in found] == [
        (files[0], 3, os.path.getsize(files[0])),
        (files[1], 250, os.path.getsize(files[1])),
    ]
    data = Path(files[0]).read_bytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    assert found[0].footer_sha256 == hashlib.sha256(footer).hexdigest()
    assert count_rows(files, full=True) == found
    assert count_rows([]) == []


def test_every_bad_file_is_named_at_once(tmp_path: Path) -> None:
    """C17, C19."""
    good = numbers(tmp_path / "good.parquet", 100)
    data = Path(good).read_bytes()
    bad = {
        "empty.parquet": (b"", "is 0 bytes"),
        "text.parquet": (b"prompt,answer\n1,2\n" * 10, "is not parquet"),
        "short.parquet": (b"PAR1", "is truncated"),
        "cut.parquet": (data[: len(data) // 2], "is truncated"),
        "tail.parquet": (data[:-1], "is truncated"),
        "footer.parquet": (data[:-8] + (2**31).to_bytes(4, "little") + b"PAR1", "is damaged"),
        "scrambled.parquet": (data[:-400] + bytes(392) + data[-8:], "is damaged"),
    }
    for name, (content, _) in bad.items():
        (tmp_path / name).write_bytes(content)
    missing = str(tmp_path / "missing.parquet")
    with pytest.raises(DataError) as caught:
        count_rows([good, *(str(tmp_path / name) for name in bad), missing])
    for name, (_, problem) in bad.items():
        assert f"{tmp_path / name} {problem}" in caught.value.message
    assert f"{missing} does not exist" in caught.value.message
    assert good not in caught.value.message


def test_a_damaged_page_is_found_by_a_full_read(tmp_path: Path) -> None:
    """C20: bytes flipped inside a row group, where the footer says nothing of it."""
    path = numbers(tmp_path / "a.parquet", 2000, write_page_checksum=True, compression="none")
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 3] ^= 0xFF
    Path(path).write_bytes(data)
    assert count_rows([path])[0].rows == 2000
    with pytest.raises(DataError, match=r"a\.parquet is damaged"):
        count_rows([path], full=True)


def test_a_reader_that_is_killed_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C20: the death of the reader by a signal is an unreadable file, not the death of the caller."""
    files = [numbers(tmp_path / name, 2) for name in ("first.parquet", "second.parquet", "third.parquet")]
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os, signal, sys\n"
        "from keepstep.data import count\n"
        "inspect = count.inspect\n"
        "def dying(path, columns, full):\n"
        "    if path.endswith('second.parquet'):\n"
        "        sys.stdout.write('{\"pa'); sys.stdout.flush()\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return inspect(path, columns, full)\n"
        "count.inspect = dying\n"
        "count._main()\n"
    )
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{killer}"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(count.sys, "executable", str(wrapper))
    with pytest.raises(DataError, match=r"second\.parquet: unreadable: its reader died of SIGSEGV") as caught:
        count_rows(files)
    assert "first" not in caught.value.message and "third" not in caught.value.message


def test_a_reader_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\necho '{}'\nexec sleep 60\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr(count.sys, "executable", str(wrapper))
    monkeypatch.setattr(count, "TIMEOUT_S", 0.5)
    with pytest.raises(DataError, match=r"b\.parquet: not read within"):
        count_rows(["a.parquet", "b.parquet"])


# The record


def entry(path: str, rows: int = 10, size: int = 1000, footer: str = "ab" * 32) -> FileRecord:
    return FileRecord(path, rows, size, footer)


def test_the_record_is_plain_json() -> None:
    built = record.build([entry("a", 10), entry("b", 5)], [entry("v", 3)])
    assert built["num_rows"] == 15
    assert built["files"][1] == {"path": "b", "rows": 5, "bytes": 1000, "footer_sha256": "ab" * 32}
    assert [file["path"] for file in built["val_files"]] == ["v"]
    assert json.loads(json.dumps(built)) == built


def test_no_rows_at_all() -> None:
    with pytest.raises(DataError, match=r"hold no rows: a\.parquet"):
        record.build([entry("a.parquet", 0)], [entry("v", 3)])


@pytest.mark.parametrize(
    ("train", "val", "parts"),
    [
        # C2: other rows.
        ([entry("a", 20), entry("b")], [entry("v")], ["a: 10 rows expected, 20 found"]),
        ([entry("a", size=999), entry("b")], [entry("v")], ["a: 1000 bytes expected, 999 found"]),
        ([entry("a"), entry("b", footer="cd" * 32)], [entry("v")], ["b: same size, other content", "abab", "cdcd"]),
        ([entry("z", 4), entry("b")], [entry("v")], ["z (in place of a): 10 rows expected, 4 found"]),
        # C16: one file of two; both lists are named.
        (
            [entry("a")],
            [entry("v")],
            ["training: 2 files with 20 rows expected (a, b), 1 files with 10 rows", "(a)"],
        ),
        (
            [entry("a"), entry("b")],
            [],
            ["validation: 1 files with 10 rows expected (v), 0 files", "(none)"],
        ),
    ],
)
def test_differences_are_named(train: list[FileRecord], val: list[FileRecord], parts: list[str]) -> None:
    recorded = record.build([entry("a"), entry("b")], [entry("v")])
    (difference,) = record.compare(recorded, record.build(train, val))
    for part in parts:
        assert part in difference


def test_the_same_files_elsewhere_are_the_same() -> None:
    recorded = record.build([entry("old/a")], [])
    assert record.compare(recorded, record.build([entry("new/a")], [])) == []


# Loading


def test_rows_of_all_files_in_order(tmp_path: Path) -> None:
    files = [numbers(tmp_path / "a.parquet", 2), write(tmp_path / "b.parquet", [row("x", "y")])]
    found = load(files)
    assert (len(found), found.num_raw_rows) == (3, 3)
    assert [found[index].prompt_text for index in range(3)] == ["0+1=", "1+1=", "x"]
    assert [found[index].index for index in range(3)] == [0, 1, 2]
    last = found[2]
    assert (last.prompt_ids, last.data_source, last.ground_truth) == ([ord("x")], "test/source", "y")
    assert last.extra_info == {"split": "train"}


def test_chat_template(tmp_path: Path) -> None:
    """The template writes its special tokens itself: the tokenizer must add none."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]
    file = write(tmp_path / "a.parquet", [row(messages)])
    found = load([file], CharTokenizer(chat_template="any", begin=1))
    assert found[0].prompt_text == "<system>be brief<user>1+1=<assistant>"
    assert found[0].prompt_ids == [ord(character) for character in found[0].prompt_text]


def test_without_a_template_the_contents_are_joined(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief. "}, {"role": "user", "content": "1+1="}]
    file = write(tmp_path / "a.parquet", [row(messages)])
    found = load([file], CharTokenizer(begin=1))
    assert found[0].prompt_text == "be brief. 1+1="
    assert found[0].prompt_ids == [1, *map(ord, "be brief. 1+1=")]


def test_other_column_names(tmp_path: Path) -> None:
    renamed = {**row("unused"), "question": "2+2=", "source": "mine"}
    file = write(
        tmp_path / "a.parquet", [{k: v for k, v in renamed.items() if k not in ("prompt", "data_source", "extra_info")}]
    )
    found = load([file], prompt_key="question", reward_fn_key="source")
    assert (found[0].prompt_text, found[0].data_source, found[0].extra_info) == ("2+2=", "mine", {})


def test_overlong_prompts_are_dropped_and_keep_their_index(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("12345"), row("1234"), row(""), row("1")])
    found = load([file], max_prompt_length=4)
    assert [(entry.index, entry.prompt_text) for entry in found.rows] == [(1, "1234"), (3, "1")]
    assert found.num_raw_rows == 4


def test_overlong_prompts_are_refused_when_not_filtered(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("12345"), row("1234")])
    with pytest.raises(DataError, match=r"1 of 2 prompts .* data\.max_prompt_length=4 .*longest has 5"):
        load([file], max_prompt_length=4, filter_overlong_prompts=False)


def test_no_row_left(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("12345")])
    with pytest.raises(DataError, match=r"No row is left of 1 in .*a\.parquet"):
        load([file], max_prompt_length=4)


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, column: str) -> None:
    file = write(tmp_path / "a.parquet", [{k: v for k, v in row("x").items() if k != column}])
    with pytest.raises(DataError) as caught:
        load([file])
    assert caught.value.message.startswith(f"{file}: column {column} is missing; it has ")
    assert "extra_info" in caught.value.message


@pytest.mark.parametrize("prompt", [None, 3, [], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_a_prompt_of_another_form_is_named_by_its_row(tmp_path: Path, prompt: Any) -> None:
    file = write(tmp_path / "a.parquet", [row(prompt)])
    with pytest.raises(DataError, match=r"a\.parquet: row 0: the prompt is neither text nor"):
        load([file])


def test_a_row_without_ground_truth(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("x"), {**row("x"), "reward_model": None}])
    with pytest.raises(DataError, match=r"a\.parquet: row 1 has no reward_model\.ground_truth"):
        load([file])


def test_a_file_that_breaks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(Path(numbers(path, 10)).read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        load([str(path)])
