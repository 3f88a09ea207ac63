"""Cutting a rank's rows into micro-batches: by number of rows, or by a budget of tokens. Pure.

The loss divides by the whole mini-batch, so how it is cut changes no result but in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence


def by_count(rows: Sequence[int], size: int) -> list[list[int]]:
    """`size` rows each, in order."""
    return [list(rows[first : first + size]) for first in range(0, len(rows), size)]


def by_tokens(rows: Sequence[int], lengths: Sequence[int], budget: int, *, packed: bool) -> list[list[int]]:
    """As many rows as `budget` tokens hold, rows of like length together; a row that is longer stands alone.

    Args:
        lengths: tokens of each row of the batch, prompt and response.
        packed: rows stand one behind the other; else each takes as many tokens as the longest beside it.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if parts and cost([*parts[-1], row], lengths, packed=packed) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def split_to(parts: list[list[int]], lengths: Sequence[int], num: int) -> list[list[int]]:
    """The same rows in `num` parts (not below `len(parts)`), the largest halved first.

    Every forward pass is a collective of all ranks, so all must make equally many.
    """
    found = [list(part) for part in parts]
    while len(found) < num:
        divisible = [part for part in found if len(part) > 1]
        assert divisible, "every rank has as many rows, so none needs more parts than another has rows"
        largest = max(divisible, key=lambda part: sum(lengths[row] for row in part))
        half = len(largest) // 2
        found.append(largest[half:])
        del largest[half:]
    return found


def cost(part: Sequence[int], lengths: Sequence[int], *, packed: bool) -> int:
    """Tokens that a forward pass of these rows is made of."""
    own = [lengths[row] for row in part]
    return sum(own) if packed else max(own) * len(own)
