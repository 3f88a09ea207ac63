"""The index of a Hugging Face folder: which file holds which tensor, in the words of somebody else."""

from __future__ import annotations

from pathlib import Path

from keepstep.checkpoint import strict_json


def index_problems(path: Path, present: set[str] | None = None) -> list[str]:
    """What is wrong with a `*.index.json`: it may name plain files beside it, nothing else.

    Args:
        present: names beside it, to be held against; None: only its own names are looked at.
    """
    try:
        value = strict_json.load(path)
    except strict_json.StrictJsonError as error:
        return [str(error)]
    weights = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weights, dict):
        return ["has no weight_map"]
    names = set(filter(lambda name: isinstance(name, str), weights.values()))
    if any(not isinstance(name, str) for name in weights.values()):
        return ["weight_map holds what is no file name"]
    outside = sorted(name for name in names if "/" in name or "\\" in name or name in ("", ".", ".."))
    if outside:
        return [f"names {outside[0]!r}, which is no file beside it"]
    absent = sorted(names - present) if present is not None else []
    return [f"names {name}, which is missing" for name in absent[:5]]
