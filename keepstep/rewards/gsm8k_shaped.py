"""GSM8K for models that rarely answer right: a tenth for marking an answer at all, the rest for the right one."""

from __future__ import annotations

import re
from typing import Any

from keepstep.rewards import gsm8k

MARKED = 0.1
_MARK = re.compile(r"####\s*-?\$?[\d,.]*\d")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    right = gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    marked = float(_MARK.search(solution_str) is not None)
    return {"score": MARKED * marked + (1 - MARKED) * right, "right": right, "marked": marked}
