"""Reading what somebody else may have written: never a link, a FIFO or a device, never more than is expected."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

DISK, PAGE_CACHE = "disk", "page cache"
MOST_FILES = 200_000
_WINDOW_BYTES = 1024**3
_KINDS = (
    (stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip


class FileError(ValueError):
    """The file cannot be read safely; the message says why, without its name."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, unbuffered. Nothing else is ever opened: a FIFO would hang, a device may act.

    Raises:
        FileError: missing, not a regular file, or not readable.
    """
    try:
        _require_regular(path.lstat().st_mode)
        # Non-blocking, because the name may have become a FIFO since.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileError("missing") from None
    except OSError as error:
        raise FileError(f"cannot be read ({error.strerror})") from error
    file = os.fdopen(fd, "rb", buffering=0)
    try:
        _require_regular(os.fstat(fd).st_mode)
    except FileError:
        file.close()
        raise
    return file


def size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_small(path: Path, most_bytes: int) -> bytes:
    """A file's content, its size looked at first: a sparse file declares terabytes.

    Raises:
        FileError: as `open_regular`; larger than `most_bytes`; the disk fails.
    """
    with open_regular(path) as file:
        size = size_of(file)
        if size > most_bytes:
            raise FileError(f"{size} bytes, at most {most_bytes} are read")
        try:
            return file.read(size)
        except OSError as error:
            raise FileError(f"cannot be read ({error.strerror})") from error


def list_files(folder: Path) -> tuple[set[str], list[str]]:
    """Relative paths of everything below that is no folder, and what is wrong with the folders.

    Links to folders are named and not entered. Ends at `MOST_FILES`.
    """
    names: set[str] = set()
    problems: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(folder / prefix) as entries:
                for entry in entries:
                    name = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name + "/")
                    elif entry.is_symlink() and entry.is_dir():
                        problems.append(f"{name}: a link out of the checkpoint")
                    else:
                        names.add(name)
                    if len(names) + len(pending) > MOST_FILES:
                        return names, [*problems, f"more than {MOST_FILES} files and folders"]
        except OSError as error:
            problems.append(f"{prefix or '.'}: cannot be read ({error.strerror})")
    return names, problems


def drop_and_tell(file: BinaryIO) -> str:
    """Have the next read come from the disk; `DISK` when it will, `PAGE_CACHE` when pages stayed or nobody can tell.

    Pages leave the cache only when they are clean, so after an fsync; filesystems in memory keep theirs, and so does
    the cache of a page that a process has mapped.
    """
    fd, size = file.fileno(), size_of(file)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    windows = range(0, size, _WINDOW_BYTES)
    cached = any(_is_cached(fd, begin, min(_WINDOW_BYTES, size - begin)) for begin in windows)
    return PAGE_CACHE if cached else DISK


def _is_cached(fd: int, begin: int, num_bytes: int) -> bool:
    """Whether any page of a range is in the page cache. Asked with mincore, which reads nothing itself."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    try:
        # Private and writable, because ctypes takes no address of read-only memory; nothing is written.
        window = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY, offset=begin)
    except OSError:
        # Address space has a limit here, or memory may not be promised twice: then nobody can tell.
        return True
    with window:
        first = ctypes.c_char.from_buffer(window)
        failed = library.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(num_bytes), pages)
        del first
    # One bit of each byte says it, the others are not defined; as two large numbers they are compared at once.
    mask = int.from_bytes(b"\1" * len(pages), "little")
    return bool(failed) or bool(int.from_bytes(bytes(pages), "little") & mask)


def printable(text: str, most_chars: int = 400) -> str:
    """Text that a terminal shows and does not obey: control characters and broken code points are escaped."""
    shown = text[:most_chars] + ("…" if len(text) > most_chars else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in shown)


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise FileError(f"not a regular file: {kind}")
