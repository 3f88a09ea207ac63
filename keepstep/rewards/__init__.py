"""Reward functions: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`."""
