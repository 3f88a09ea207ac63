"""How numbers, times and a run's own text are written for people. Pure."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

MAX_TEXT = 4000
JOIN = "\u00a0"
"""A space at which no line breaks."""
_USER_OF_URL = re.compile(r"://[^/@\s]+@")
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of what follows."""


def showable(text: str) -> str:
    """Text of a run without the credentials of an address, and without what is no text."""
    return _USER_OF_URL.sub("://…@", _UNSHOWN.sub("\ufffd", text)).encode("utf-8", "replace").decode()


def time_text(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float | None) -> str:
    """Two units at most: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}{JOIN}s"
    whole = int(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            return f"{whole // unit_s}{JOIN}{unit}" + (f"{JOIN}{rest}{JOIN}{part}" if rest else "")
    return f"{whole}{JOIN}s"


def bytes_text(num_bytes: float) -> str:
    """In the largest binary unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def value_text(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, float):
        return number_text(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def number_text(value: float) -> str:
    """Four digits; with an exponent, where there must be one, three."""
    if 1e4 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"
