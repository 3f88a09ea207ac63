"""1 for an answer that is mathematically equal to the expected one, 0 for another: MATH, AIME and the like.

Parsed and compared by Math-Verify (https://github.com/huggingface/Math-Verify), which knows LaTeX, fractions, sets,
intervals and units. It sets alarms of its own, so it works in the main thread of a process only.
"""

from __future__ import annotations

from typing import Any

from keepstep.rewards.boxed import last_boxed


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """The answer is what the last box holds, or, without a box, the last expression of the text.

    Args:
        ground_truth: an expression, or a whole solution with its answer in a box.
    """
    from math_verify import parse, verify

    expected, given = (last_boxed(text) for text in (str(ground_truth), solution_str))
    gold = parse(_as_math(str(ground_truth) if expected is None else expected))
    answer = parse(solution_str if given is None else _as_math(given))
    return float(bool(gold) and bool(answer) and verify(gold, answer))


def _as_math(text: str) -> str:
    return text if "$" in text else f"${text}$"
