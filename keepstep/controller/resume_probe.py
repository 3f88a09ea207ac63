"""The probe: a few held-out prompts' log-probs, stored with a checkpoint and computed again when it is loaded.

Digests say that the bytes are those that were saved. The probe says that model code, precision and weights together
still make the same policy: an option that changes the state dict, another library, weights that were saved before they
were gathered. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.errors import ProbeError
from keepstep.waivers import PROBE

NUM_PROMPTS = 4
MAX_TOKENS = 256
TOLERANCES = {"fp32": 1e-3, "bf16": 0.1}
"""Nats per token. On the same hardware the difference is 0; these leave room for other kernels."""

Record = dict[str, Any]


def tolerance(precision: str) -> float:
    """Largest accepted difference in nats a token."""
    return TOLERANCES[precision]


def choose_prompts(prompts: Sequence[list[int]]) -> list[list[int]]:
    """The first few prompts that have a token to predict, each cut to a length."""
    return [ids[:MAX_TOKENS] for ids in prompts if len(ids) > 1][:NUM_PROMPTS]


def record(prompts: list[list[int]], log_probs: list[list[float]]) -> Record:
    """The probe's part of trainer_state.json."""
    return {"prompts": prompts, "log_probs": log_probs}


def largest_gap(then: list[list[float]], now: list[list[float]]) -> float:
    """Largest difference of a token's log-prob in nats; infinite where the shapes differ or a value is not a number."""
    if [len(row) for row in then] != [len(row) for row in now]:
        return float("inf")
    gaps = [abs(a - b) for before, after in zip(then, now, strict=True) for a, b in zip(before, after, strict=True)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


def check(then: Record, now: list[list[float]], *, precision: str, where: str) -> float:
    """The largest gap.

    Raises:
        ProbeError: it is above the precision's tolerance.
    """
    gap, most = largest_gap(then["log_probs"], now), tolerance(precision)
    if not gap <= most:
        raise ProbeError(
            f"The policy loaded from {where} is not the one that was saved: log-probs of its probe prompts differ by "
            f"up to {gap:.3g} nats a token, tolerance {most:g} ({precision}).",
            "The bytes are as they were saved, so the model's code, options or libraries are not: compare "
            f"`keepstep preflight` with the first start. resume.allow=[{PROBE}] goes on with it all the same.",
        )
    return gap
