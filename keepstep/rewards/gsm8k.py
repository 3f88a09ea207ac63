"""1 for the right last answer to a GSM8K question, 0 for another or none.

The data set marks it by `#### 72` (https://github.com/openai/grade-school-math, `extract_answer`); a model that was not
taught to is marked by the last number that it writes, in a box or not.
"""

from __future__ import annotations

import re
from typing import Any

from keepstep.rewards.boxed import last_boxed

_NUMBER = r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """`ground_truth`: the number, or the whole solution that ends with `#### <number>`."""
    expected = answer_of(str(ground_truth))
    return float(expected is not None and answer_of(solution_str) == expected)


def answer_of(text: str) -> float | None:
    """The marked number, else that of the last box, else the last number of the text."""
    if marked := _MARKED.findall(text):
        return _to_number(marked[-1])
    boxed = last_boxed(text)
    found = _ANY.findall(text if boxed is None else boxed)
    return _to_number(found[-1]) if found else None


def _to_number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", ""))
    except ValueError:
        return None
