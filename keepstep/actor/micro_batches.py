"""Cutting a rank's rows into micro-batches: by number of rows, or by a budget of tokens. Pure.

The loss divides by the whole mini-batch, so how it is cut changes no result but in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.actor.layout import Costs


def by_count(rows: Sequence[int], size: int) -> list[list[int]]:
    """`size` rows each, in order."""
    return [list(rows[first : first + size]) for first in range(0, len(rows), size)]


def by_tokens(rows: Sequence[int], costs: Costs, budget: int) -> list[list[int]]:
    """As many groups of rows as `budget` tokens hold, those of like cost together.

    A group that costs more is cut, a row that does stands alone.
    """
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(costs.groups[row], []).append(row)
    units = [unit for group in groups.values() for unit in _filled([[row] for row in group], costs, budget)]
    return _filled(sorted(units, key=lambda unit: -costs(unit)), costs, budget)


def _filled(units: Sequence[list[int]], costs: Costs, budget: int) -> list[list[int]]:
    """Units in order, each joined to those before it while the budget holds them."""
    parts: list[list[int]] = []
    for unit in units:
        if parts and costs([*parts[-1], *unit]) <= budget:
            parts[-1] = [*parts[-1], *unit]
        else:
            parts.append(unit)
    return parts


def split_to(parts: list[list[int]], costs: Costs, num: int) -> list[list[int]]:
    """The same rows in `num` parts (not below `len(parts)`), the costliest halved first.

    Every forward pass is a collective of all ranks, so all must make equally many.
    """
    found = [list(part) for part in parts]
    while len(found) < num:
        divisible = [part for part in found if len(part) > 1]
        assert divisible, "every rank has as many rows, so none needs more parts than another has rows"
        largest = max(divisible, key=costs)
        half = len(largest) // 2
        found.append(largest[half:])
        del largest[half:]
    return found
