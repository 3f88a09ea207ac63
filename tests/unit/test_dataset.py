"""Data files: found, counted in a process of their own, recorded, compared, loaded."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from keepstep.config.schema import DataConfig
from keepstep.data import count
from keepstep.data.count import count_rows, read_rows
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
    return Dataset.load(files, settings(**values), tokenizer or CharTokenizer(), split="train", seed=42)


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
    assert [entry.columns[0][0] for entry in found] == ["prompt", "prompt"]
    assert read_rows(files)[0] == found
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
        read_rows([path])


def replace_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have the reader's interpreter run `script` in place of the module."""
    (tmp_path / "reader.py").write_text(script)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/reader.py"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(count.sys, "executable", str(wrapper))


KILLER = """
import os, signal, sys, threading
from keepstep.data import reader
inspect = reader.inspect
def dying(path, columns, on_batch):
    if "bad" in os.path.basename(path):
        if on_batch:  # one thread: a line of its own may be torn
            sys.stdout.write('{"pa'); sys.stdout.flush()
        # To this very thread, as a fault is: one to the process may strike later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
    return inspect(path, columns, on_batch)
reader.inspect = dying
reader.main()
"""


@pytest.mark.parametrize("read", [count_rows, read_rows])
def test_readers_that_are_killed_name_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    """C20: the death of the reader by a signal is an unreadable file, not the death of the caller, and hides no other.

    The files are open side by side when it happens: only those that kill a reader by themselves are named for it.
    """
    names = ["a", "bad_1", "b", "c", "bad_2", "d"]
    files = [numbers(tmp_path / f"{name}.parquet", 2) for name in names]
    (tmp_path / "c.parquet").write_bytes(b"")
    replace_reader(tmp_path, monkeypatch, KILLER)
    with pytest.raises(DataError) as caught:
        read(files)
    assert caught.value.message.splitlines()[1:] == [
        f"  {files[1]} is unreadable: its reader died of SIGSEGV",
        f"  {files[3]} is 0 bytes: nothing was written into it",
        f"  {files[4]} is unreadable: its reader died of SIGSEGV",
    ]


def test_flipped_bytes_never_end_the_caller(tmp_path: Path) -> None:
    """C20: flips all over the row groups of a file: the damaged ones are named, a whole one never."""
    good = numbers(tmp_path / "good.parquet", 400, compression="snappy", write_page_checksum=True)
    data = Path(good).read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    files = [good]
    for position in range(4, footer, footer // 40):
        bad = tmp_path / f"flipped_{position}.parquet"
        bad.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        files.append(str(bad))
    assert {record.rows for record in count_rows(files)} == {400}
    with pytest.raises(DataError) as caught:
        read_rows(files)
    assert good not in caught.value.message
    num_found = int(caught.value.message.split()[0])
    assert num_found >= len(files) * 3 // 4, "most bytes are under a checksum"


def test_a_reader_that_is_killed_between_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is to blame: the next reader goes on, but a digest of the rest is not one of all rows."""
    files = [numbers(tmp_path / f"{name}.parquet", 2) for name in "abc"]
    script = KILLER.replace('if "bad" in os.path.basename(path):', "if False:").replace(
        "reader.main()",
        "say = reader.Answers.say\n"
        "def ending(self, **answer):\n"
        "    say(self, **answer)\n"
        "    if 'end' in answer and 'a.parquet' in answer['record']['path']:\n"
        "        signal.pthread_kill(threading.get_ident(), signal.SIGKILL)\n"
        "reader.Answers.say = ending\n"
        "reader.main()",
    )
    replace_reader(tmp_path, monkeypatch, script)
    monkeypatch.setattr(count, "NUM_THREADS", 1)
    assert [record.rows for record in count_rows(files)] == [2, 2, 2]
    with pytest.raises(DataError, match="killed between two files"):
        read_rows(files)


def test_a_reader_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_reader(tmp_path, monkeypatch, "raise SystemExit('no such library')")
    with pytest.raises(DataError, match=r"does not start: its reader ended with 1: no such library"):
        count_rows([numbers(tmp_path / "a.parquet", 1)])


def test_a_reader_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time\nprint('{\"begin\": 1}', flush=True)\ntime.sleep(60)\n"
    replace_reader(tmp_path, monkeypatch, script)
    monkeypatch.setattr(count, "TIMEOUT_S", 5.0)
    with pytest.raises(DataError, match=r"^b\.parquet: not read within 5 s"):
        count_rows(["a.parquet", "b.parquet"])


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


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_cap_draws_the_same_rows_at_every_start(tmp_path: Path, shuffle: bool) -> None:
    """C1: 50 of 200 rows over two files, no seed of its own set; every start has the same, in the files' order."""
    files = [numbers(tmp_path / "a.parquet", 120), write(tmp_path / "b.parquet", [row(f"b{at}") for at in range(80)])]
    starts = [load(files, train_max_samples=50, shuffle=shuffle) for _ in range(2)]
    indices = [entry.index for entry in starts[0].rows]
    assert indices == sorted(set(indices)) and len(indices) == 50
    assert starts[0].row_ids_sha256 == starts[1].row_ids_sha256
    assert [entry.index for entry in starts[1].rows] == indices
    assert (indices == list(range(50))) == (not shuffle)
    everything = load(files, shuffle=shuffle)
    assert [entry.prompt_ids for entry in starts[0].rows] == [everything[index].prompt_ids for index in indices]
    assert starts[0].num_raw_rows == 200 and len(everything) == 200
    assert load(files, val_max_samples=50).row_ids_sha256 == everything.row_ids_sha256


def test_a_cap_of_validation_rows_is_drawn_apart(tmp_path: Path) -> None:
    files = [numbers(tmp_path / "a.parquet", 200)]
    config = settings(train_max_samples=50, val_max_samples=50)
    train, val = (Dataset.load(files, config, CharTokenizer(), split=split, seed=42) for split in ("train", "val"))
    assert len(train) == len(val) == 50
    assert [entry.index for entry in train.rows] != [entry.index for entry in val.rows]


def test_a_cap_is_drawn_before_the_filter(tmp_path: Path) -> None:
    """As verl does: the drawn rows are filtered, no others take their place."""
    file = write(tmp_path / "a.parquet", [row("1" * (1 + at % 2)) for at in range(10)])
    found = load([file], train_max_samples=5, shuffle=False, max_prompt_length=1)
    assert [entry.index for entry in found.rows] == [0, 2, 4]


def test_row_ids_by_hand(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("12345"), row("ab"), row("c")])
    found = load([file], max_prompt_length=4)
    expected = hashlib.sha256(struct.pack("<7q", 1, 2, ord("a"), ord("b"), 2, 1, ord("c")))
    assert found.row_ids_sha256 == expected.hexdigest()
    assert found.usage()["rows"] == 2


@pytest.mark.parametrize(
    ("tokenizer", "values"),
    [
        (CharTokenizer(begin=1), {}),
        (CharTokenizer(chat_template="any"), {}),
        (None, {"max_prompt_length": 4}),
        (None, {"train_max_samples": 11}),
    ],
)
def test_what_changes_the_rows_used_changes_their_digest(
    tmp_path: Path, tokenizer: CharTokenizer | None, values: dict[str, Any]
) -> None:
    """C1: the tokenizer, its template, the filter and the cap."""
    files = [numbers(tmp_path / "a.parquet", 12)]
    before, after = load(files), load(files, tokenizer, **values)
    assert after.row_ids_sha256 != before.row_ids_sha256
    assert after.rows_sha256 == before.rows_sha256


def test_the_digest_of_the_files_rows_is_that_of_a_deep_check(tmp_path: Path) -> None:
    """Every column counts, used or not; a changed answer is seen though no prompt changed."""
    files = [write(tmp_path / "a.parquet", [{**row("1+1=", "2"), "level": 3}]), numbers(tmp_path / "b.parquet", 5)]
    found = load(files)
    assert found.rows_sha256 == read_rows(files)[1]
    write(tmp_path / "a.parquet", [{**row("1+1=", "3"), "level": 3}])
    assert load(files).row_ids_sha256 == found.row_ids_sha256
    assert load(files).rows_sha256 != found.rows_sha256


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
