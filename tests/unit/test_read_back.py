"""Read-back says where the bytes came from."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from keepstep.checkpoint import files
from keepstep.checkpoint.files import DISK, PAGE_CACHE, drop_and_tell, open_regular
from keepstep.checkpoint.verify import verify
from tests.unit import builder

SHM = Path("/dev/shm")


def is_in_memory(path: Path) -> bool:
    """Whether a filesystem keeps its files in memory alone."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, kind = max((mount for mount in mounts if path.is_relative_to(mount[0])), key=lambda mount: len(mount[0]))
    return kind in ("tmpfs", "ramfs")


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    if is_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(33 * 1024**2))
        os.fsync(file.fileno())
    return path


def test_after_an_fsync_it_comes_from_the_disk(durable: Path):
    with open_regular(durable) as file:
        assert drop_and_tell(file) == DISK


def test_pages_that_stay_are_said(durable: Path):
    """A page that a process has mapped does not leave the cache; one of them is enough."""
    with durable.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[16 * 1024**2] in range(256)
        with open_regular(durable) as again:
            assert drop_and_tell(again) == PAGE_CACHE


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no filesystem in memory here")
def test_a_filesystem_in_memory_is_never_called_disk():
    path = SHM / f"keepstep-test-{os.getpid()}"
    path.write_bytes(b"x" * 4096)
    try:
        with open_regular(path) as file:
            assert drop_and_tell(file) == PAGE_CACHE
    finally:
        path.unlink()


def test_where_nobody_can_tell_it_is_not_called_disk(durable: Path, monkeypatch: pytest.MonkeyPatch):
    """A limit on the address space refuses the window: that says nothing against the file."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(files.mmap, "mmap", refuse)
    with open_regular(durable) as file:
        assert drop_and_tell(file) == PAGE_CACHE


def test_the_verdict_says_it(durable: Path, tmp_path: Path):
    run = builder.run_in(tmp_path)
    builder.write(run, 20)
    folder = run.checkpoint(20)
    assert verify(folder).read_from == verify(folder).to_record()["read_from"] == DISK
    assert verify(folder, quick=True).read_from is None
    name = next(path for path in (folder / "tokenizer").iterdir() if path.stat().st_size)
    with name.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0] in range(256)
        assert verify(folder).read_from == PAGE_CACHE
