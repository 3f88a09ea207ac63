"""1 for exactly the expected text, 0 for anything else."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    return 1.0 if solution_str.strip() == str(ground_truth).strip() else 0.0
