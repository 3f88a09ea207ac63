"""The reward that belongs to a row's `data_source`, as verl's default does it."""

from __future__ import annotations

from typing import Any

from keepstep.rewards import exact_match, gsm8k, math

_MATH = (
    "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math", "aime",
    "numina_",
)  # fmt: skip


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """
    Raises:
        ValueError: no reward is known for `data_source`.
    """
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    if data_source.startswith(_MATH):
        return math.compute_score(data_source, solution_str, ground_truth, extra_info)
    if data_source.startswith("keepstep/"):
        return exact_match.compute_score(data_source, solution_str, ground_truth, extra_info)
    raise ValueError(f"no reward is known for the data source {data_source!r}; set custom_reward_function")
