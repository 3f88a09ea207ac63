"""1 for a response of the form `<think>…</think><answer>…</answer>`, 0 for another (DeepSeek-R1, arXiv:2501.12948)."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile(r"\s*<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    found = _FORM.fullmatch(solution_str)
    return float(found is not None and not any(_TAG.search(part) for part in found.groups()))
