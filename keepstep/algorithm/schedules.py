"""Learning-rate schedules as functions of the step: no state, so a resume cannot shift them."""

from __future__ import annotations

import math


def lr_factor(update: int, *, num_warmup: int, num_total: int, kind: str, min_ratio: float = 0.0) -> float:
    """Factor on the peak learning rate for the update with this 0-based index.

    Linear warm-up reaches the peak at update `num_warmup`; `constant` stays there, `cosine` falls to `min_ratio` at
    `num_total` (arXiv:1608.03983, eq. 5 without restarts).
    """
    if update < num_warmup:
        return (update + 1) / (num_warmup + 1)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (update - num_warmup) / max(1, num_total - num_warmup))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
