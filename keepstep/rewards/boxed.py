"""The content of a LaTeX box."""

from __future__ import annotations

_BOXES = ("\\boxed{", "\\fbox{")


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` (or `\\fbox{…}`) whose braces close; None: there is none."""
    begin = max((text.rfind(box) + len(box) for box in _BOXES if box in text), default=None)
    if begin is None:
        return None
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None
