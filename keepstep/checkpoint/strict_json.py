"""JSON as this project writes it: no duplicate keys, no NaN, bounded size and depth."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_BYTES = 64 * 1024**2


class StrictJsonError(ValueError):
    """The text is not the JSON that it should be; the message says why."""


def loads(data: bytes) -> Any:
    """Parse, or raise `StrictJsonError`."""
    if len(data) > MAX_BYTES:
        raise StrictJsonError(f"{len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise StrictJsonError("nested too deeply") from None
    except StrictJsonError:
        raise
    except ValueError as error:
        raise StrictJsonError(f"not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise StrictJsonError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name} is not JSON")
