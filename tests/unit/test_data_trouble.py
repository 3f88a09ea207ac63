"""What stands against a data file: one sentence of its own for each, with what to delete or to set right."""

from __future__ import annotations

import io
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from keepstep.data import file_check
from keepstep.data.count import count_rows
from keepstep.data.file_check import FileProblem, inspect
from keepstep.data.spec import resolve_files
from keepstep.errors import DataError
from keepstep.run import RunDir
from tests.unit.s3_stub import Fault, Stored, Stub

AN_HOUR_AGO = time.time() - 3600


def content(num_rows: int = 100) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [f"{at}+1=" for at in range(num_rows)]}), buffer)
    return buffer.getvalue()


def put(path: Path, data: bytes, modified: float = AN_HOUR_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (modified, modified))
    return path


def problem(path: Path) -> str:
    with pytest.raises(FileProblem) as caught:
        inspect(str(path), [], None)
    return str(caught.value)


def test_zero_bytes(tmp_path: Path) -> None:
    """C17."""
    assert problem(put(tmp_path / "train.parquet", b"")) == "is 0 bytes: nothing was written into it"


def test_a_truncated_file_is_not_said_to_be_cached(tmp_path: Path) -> None:
    path = put(tmp_path / "train.parquet", content()[:-40])
    assert problem(path) == f"is truncated: its {len(content()) - 40} bytes do not end with a parquet footer"


def test_not_parquet_and_encrypted(tmp_path: Path) -> None:
    assert problem(put(tmp_path / "a", b"a,b\n1,2\n")) == "is not parquet: it does not begin with PAR1"
    assert problem(put(tmp_path / "b", b"PARE" + bytes(40) + b"PARE")) == "is encrypted parquet, which cannot be read"


def test_a_column_that_is_missing(tmp_path: Path) -> None:
    path = put(tmp_path / "train.parquet", content())
    with pytest.raises(FileProblem, match=r"^has no column answer; it has prompt$"):
        inspect(str(path), ["prompt", "answer"], None)


def test_a_footer_that_does_not_agree_with_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that hands out fewer rows without an error must not pass for a whole file."""
    path = put(tmp_path / "train.parquet", content())
    batches = list(pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=60))
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", lambda self, **_: batches[:1])
    with pytest.raises(FileProblem, match=r"^is damaged: its pages hold 60 rows, its footer names 100$"):
        inspect(str(path), [], lambda batch: None)


# Still being written


def test_a_fresh_file_without_a_footer_may_be_in_the_making(tmp_path: Path) -> None:
    path = put(tmp_path / "train.parquet", content()[:-40], modified=time.time())
    found = problem(path)
    assert found.startswith("is truncated or still being written: ")
    assert "s ago. Wait until its writer has closed it" in found


@pytest.mark.parametrize("ending", [".incomplete", ".tmp", ".crdownload", ".part"])
def test_the_name_of_an_unfinished_download(tmp_path: Path, ending: str) -> None:
    path = put(tmp_path / f"train.parquet{ending}", content())
    assert problem(path) == f"is an unfinished download: its name ends with {ending}"


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its size stays the same: another footer may have been put in place of the one that was read."""
    path = put(tmp_path / "train.parquet", content())
    parse = file_check._parse

    def grow(footer: bytes) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return parse(footer)

    monkeypatch.setattr(file_check, "_parse", grow)
    size = len(content())
    assert problem(path).startswith(
        f"is still being written: it changed while it was read ({size} bytes, then {size + 4})"
    )

    def touch(footer: bytes) -> Any:
        os.utime(path, (AN_HOUR_AGO + 1, AN_HOUR_AGO + 1))
        return parse(footer)

    put(path, content())
    monkeypatch.setattr(file_check, "_parse", touch)
    assert problem(path).startswith("is still being written")


# A cached copy


@pytest.fixture
def cached(tmp_path: Path) -> tuple[Path, Path]:
    """(link, blob) of a half-downloaded file in a Hugging Face cache: its last 4 KiB are missing."""
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    data = content(4000)
    blob = put(repository / "blobs" / "0123abc", data[:-4096])
    link = repository / "snapshots" / "deadbeef" / "main" / "train.parquet"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link, blob


def test_a_truncated_copy_in_the_cache(cached: tuple[Path, Path]) -> None:
    """C19: the cached path, the source path, and which to delete; by the link and by the blob."""
    link, blob = cached
    source = "hf://datasets/openai/gsm8k@deadbeef/main/train.parquet"
    for path in (link, blob):
        found = problem(path)
        assert found.startswith("is truncated: ")
        assert f"It is the cached copy {blob} of {source}: delete {blob} and {link}, then fetch it again" in found


def test_an_unfinished_download_beside_a_copy(cached: tuple[Path, Path]) -> None:
    """C19."""
    link, blob = cached
    unfinished = put(blob.with_name("0123abc.incomplete"), b"PAR1")
    assert f"Beside it lies an unfinished download: {unfinished}" in problem(link)
    assert f"delete {blob}, {link} and {unfinished}" in problem(link)


def test_a_cached_copy_of_an_address(tmp_path: Path) -> None:
    """C19: where a file beside the copy names what it was fetched from."""
    path = put(tmp_path / "downloads" / "99ff", content()[:-40])
    path.with_name("99ff.json").write_text(json.dumps({"url": "https://host/train.parquet", "etag": "x"}))
    found = problem(path)
    assert f"It is the cached copy {path} of https://host/train.parquet" in found
    assert f"delete {path} and {path}.json, then fetch it again" in found


def test_a_download_into_a_folder_that_was_cut_off(tmp_path: Path) -> None:
    path = put(tmp_path / "train.parquet", content()[:-40])
    unfinished = put(tmp_path / ".cache" / "huggingface" / "download" / "train.parquet.ab12.incomplete", b"x")
    assert f"unfinished download: {unfinished}: delete {path} and {unfinished}, then fetch it again" in problem(path)


def test_a_dangling_link(tmp_path: Path, cached: tuple[Path, Path]) -> None:
    """Named by itself and by a glob, which must not leave a shard out in silence."""
    link, blob = cached
    blob.unlink()
    run = RunDir.at(tmp_path / "run")
    with pytest.raises(DataError, match=r"train\.parquet is a link to .*0123abc, which does not exist"):
        resolve_files(str(link), run)
    put(link.with_name("other.parquet"), content())
    with pytest.raises(DataError, match=r"^1 of 2 .*\n.*train\.parquet is a link to .*which does not exist"):
        count_rows(resolve_files(str(link.parent / "*.parquet"), run))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, part in ((".", "is a folder"), ("fifo", "is not a regular file")):
        with pytest.raises(DataError, match=part):
            resolve_files(str(tmp_path / name), RunDir.at(tmp_path / "run"))


def test_a_mistyped_name_is_answered_with_the_near_one(tmp_path: Path) -> None:
    put(tmp_path / "train.parquet", content())
    for name in ("trian.parquet", "sub/train.parquet", "*.parket"):
        with pytest.raises(DataError) as caught:
            resolve_files(str(tmp_path / name), RunDir.at(tmp_path / "run"))
        assert caught.value.remedy == f"Check the name: {tmp_path} has train.parquet."


# No permission

AS_NOBODY = """
import os, sys
from keepstep.data.file_check import FileProblem, inspect
import pyarrow.parquet
os.setgid(65534); os.setuid(65534)
try:
    inspect(sys.argv[1], [], None)
except FileProblem as problem:
    print(problem)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_file_that_may_not_be_read_says_whose_it_is(closed: str) -> None:
    # Not under pytest's folder, which another user may not enter as a whole.
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        path = put(folder / "inner" / "train.parquet", content())
        folder.chmod(0o755)
        (path if closed == "file" else path.parent).chmod(0o600)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, timeout=120, check=True
        )
    finally:
        path.unlink()
        path.parent.rmdir()
        folder.rmdir()
    nobody = f"{pwd.getpwuid(65534).pw_name} (uid 65534)"
    if closed == "file":
        assert done.stdout.strip() == f"cannot be read by {nobody}: it belongs to root:root, mode 0600"
    else:
        assert done.stdout.strip() == (
            f"cannot be read: its folder {path.parent} cannot be entered by {nobody}; "
            "it belongs to root:root, mode 0600"
        )


# In a store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stub]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with Stub() as stub:
        stub.objects["train.parquet"] = Stored(content(7), None)
        stub.objects["cut.parquet"] = Stored(content(7)[:-9], None)
        monkeypatch.setenv("AWS_ENDPOINT_URL", stub.url)
        yield stub


def with_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")


def test_objects(store: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with_credentials(monkeypatch)
    (record,) = count_rows(["s3://bucket/train.parquet"])
    assert (record.rows, record.bytes) == (7, len(content(7)))
    store.faults.append(Fault("AccessDenied", "HEAD", "secret", times=100))
    store.faults.append(Fault("AccessDenied", "GET", "secret", times=100))
    with pytest.raises(DataError) as caught:
        count_rows([f"s3://bucket/{name}.parquet" for name in ("cut", "none", "secret")])
    cut, none, secret = caught.value.message.splitlines()[1:]
    assert cut.startswith("  s3://bucket/cut.parquet is truncated: its ")
    assert none == "  s3://bucket/none.parquet is not in the store (404): there is no such bucket or no such key"
    assert secret.startswith("  s3://bucket/secret.parquet is refused by the store (403): these credentials may not")
    assert "very-secret-value" not in str(caught.value)


def test_objects_without_credentials(store: Stub) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/train\.parquet needs credentials and none are found: set AWS_"):
        count_rows(["s3://bucket/train.parquet"])
