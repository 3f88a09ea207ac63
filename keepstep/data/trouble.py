"""Sentences about a data file that cannot be read: whose it is, where it came from, what to delete. Nothing is changed.

Each completes "<path> …".
"""

from __future__ import annotations

import glob
import grp
import json
import os
import pwd
import time
from pathlib import Path

from keepstep.errors import first_line

UNFINISHED = (".incomplete", ".tmp", ".crdownload", ".part")
"""How the names of files end that a download has not finished."""
RECENT_S = 10.0
"""A file without a footer that was modified within this time may still be in the making."""
_REPOSITORY_KINDS = {"datasets": "datasets/", "spaces": "spaces/", "models": ""}


def unreadable(path: str, error: OSError) -> str:
    """Why a local file cannot be opened."""
    if isinstance(error, PermissionError):
        return _no_permission(path)
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            return f"is a link to {os.readlink(path)}, which does not exist" + cache_note(path)
        return "does not exist"
    if isinstance(error, IsADirectoryError):
        return f"is a folder; name its files: {os.path.join(path, '*.parquet')}"
    return f"cannot be read: {error.strerror or error}"


def refused_by_store(error: Exception) -> str:
    """Why an object cannot be read. By the names of classes: their library is only there where it is used."""
    kind = type(error).__name__
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
        return "needs credentials and none are found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, PermissionError):
        return (
            "is refused by the store (403): these credentials may not read it. Where they may not list the bucket "
            "either, a key that does not exist is refused in the same way"
        )
    if isinstance(error, FileNotFoundError):
        return "is not in the store (404): there is no such bucket or no such key"
    return f"cannot be read from the store: {kind}: {first_line(error)}"


def truncated(path: str, size: int, age_s: float | None) -> str:
    """A file whose end is not that of a parquet file.

    Args:
        age_s: since it was modified, in seconds; None for an object in a store.
    """
    found = f"its {size} bytes do not end with a parquet footer"
    if age_s is not None and age_s < RECENT_S:
        return (
            f"is truncated or still being written: {found}, and it was modified {max(age_s, 0):.0f} s ago. "
            "Wait until its writer has closed it" + cache_note(path)
        )
    return f"is truncated: {found}" + cache_note(path)


def unfinished_name(path: str) -> str | None:
    """What a name says of a download that has not ended."""
    ending = next((ending for ending in UNFINISHED if path.endswith(ending)), None)
    return f"is an unfinished download: its name ends with {ending}" + cache_note(path) if ending else None


def cache_note(path: str) -> str:
    """Where a cached file came from, and which files to delete so that it is fetched again; empty for other files."""
    real = os.path.realpath(path)
    unfinished = _unfinished_siblings(path, real)
    beside = f". Beside it lies an unfinished download: {', '.join(unfinished)}" if unfinished else ""
    links = _hub_links(path, real)
    if links is not None:
        to_delete = [real, *links, *unfinished]
        source = _hub_source(links[0]) if links else _hub_repository(real)
        return f"{beside}. It is the cached copy {real} of {source}: delete {_listed(to_delete)}, then fetch it again"
    url = _download_url(real)
    if url is not None:
        to_delete = [real, f"{real}.json", *unfinished]
        return f"{beside}. It is the cached copy {real} of {url}: delete {_listed(to_delete)}, then fetch it again"
    return f"{beside}: delete {_listed([path, *unfinished])}, then fetch it again" if unfinished else ""


def age_s(path: str) -> float:
    """Seconds since a file was modified."""
    return time.time() - os.stat(path).st_mtime


def _no_permission(path: str) -> str:
    who = f"{_user(os.geteuid())} (uid {os.geteuid()})"
    folder = next(
        (parent for parent in reversed(Path(path).parents) if parent.is_dir() and not os.access(parent, os.X_OK)), None
    )
    what, where = (f"its folder {folder} cannot be entered", str(folder)) if folder else ("", path)
    try:
        found = os.stat(where)
    except OSError:
        return f"cannot be read by {who}: permission denied"
    owner = f"{_user(found.st_uid)}:{_group(found.st_gid)}"
    mode = f"mode {found.st_mode & 0o7777:04o}"
    if folder:
        return f"cannot be read: {what} by {who}; it belongs to {owner}, {mode}"
    return f"cannot be read by {who}: it belongs to {owner}, {mode}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _unfinished_siblings(path: str, real: str) -> list[str]:
    """Partial downloads of the same file: beside it, beside its blob, and where downloads into a folder keep theirs."""
    folder, name = os.path.split(path)
    patterns = [
        f"{glob.escape(path)}*.incomplete",
        f"{glob.escape(real)}*.incomplete",
        f"{glob.escape(os.path.join(folder, '.cache', 'huggingface', 'download', name))}*.incomplete",
    ]
    found = {file for pattern in patterns for file in glob.glob(pattern)}
    return sorted(found - {path, real})


def _hub_links(path: str, real: str) -> list[str] | None:
    """Links of a Hugging Face cache to one of its blobs; None: the file is not such a blob."""
    repository = Path(real).parent.parent
    if Path(real).parent.name != "blobs" or "--" not in repository.name:
        return None
    links = [str(link) for link in repository.glob("snapshots/**/*") if link.is_symlink()]
    found = sorted(link for link in links if os.path.realpath(link) == real)
    return [path, *(link for link in found if link != path)] if os.path.islink(path) else found


def _hub_source(link: str) -> str:
    """Address of what `…/datasets--owner--name/snapshots/<revision>/<file>` was fetched from."""
    parts = Path(link).parts
    if "snapshots" not in parts:
        return f"what {link} links to"
    at = len(parts) - 1 - parts[::-1].index("snapshots")
    return f"{_address(parts[at - 1])}@{parts[at + 1]}/{'/'.join(parts[at + 2 :])}"


def _hub_repository(real: str) -> str:
    return f"a file of {_address(Path(real).parent.parent.name)}"


def _address(folder: str) -> str:
    kind, *names = folder.split("--")
    return f"hf://{_REPOSITORY_KINDS.get(kind, kind + '/')}{'/'.join(names)}"


def _download_url(real: str) -> str | None:
    """What the `<file>.json` beside a file in the downloads of a Hugging Face data set's cache names."""
    try:
        found = json.loads(Path(f"{real}.json").read_text())
    except (OSError, ValueError):
        return None
    url = found.get("url") if isinstance(found, dict) else None
    return url if isinstance(url, str) else None


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}"
