"""JSON as this project writes it: no duplicate keys, no NaN, bounded size and depth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from keepstep.checkpoint.files import FileError, read_small

MAX_BYTES = 64 * 1024**2
MAX_VALUES = 4_000_000
"""Bounds memory: an empty list is two bytes of text and some sixty of memory."""


class StrictJsonError(ValueError):
    """The text is not the JSON that it should be; the message says why."""


def loads(data: bytes) -> Any:
    """Parse, or raise `StrictJsonError`."""
    if len(data) > MAX_BYTES:
        raise StrictJsonError(f"{len(data)} bytes, at most {MAX_BYTES} are read")
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        raise StrictJsonError(f"more than {MAX_VALUES} values")
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise StrictJsonError("nested too deeply") from None
    except StrictJsonError:
        raise
    except ValueError as error:
        raise StrictJsonError(f"not JSON: {error}") from error


def load(path: Path) -> Any:
    """Parse a file that somebody else may have written.

    Raises:
        StrictJsonError: it is no regular readable file, too large, or not such JSON.
    """
    try:
        data = read_small(path, MAX_BYTES)
    except FileError as error:
        raise StrictJsonError(str(error)) from error
    return loads(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise StrictJsonError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise StrictJsonError(f"{text} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name} is not JSON")
