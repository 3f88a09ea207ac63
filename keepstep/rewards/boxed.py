"""The content of a LaTeX box."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` (or `\\fbox{…}`) whose braces close; None: there is none."""
    opened: list[int | None] = []
    """Where the content of each open brace begins, where it is a box's."""
    begin, end = -1, -1
    for found in _BRACES.finditer(text):
        if found[0] != "}":
            opened.append(found.end() if len(found[0]) > 1 else None)
        elif opened and (closed := opened.pop()) is not None and closed > begin:
            begin, end = closed, found.start()
    return None if end < 0 else text[begin:end]
