"""Whether another attempt is worth it. Pure: failures in, decision with its reason out.

| what ended the attempt | another attempt | budget |
|---|---|---|
| config, contract, data, held, refused store, full disk, non-finite, stale weights | no | none |
| preempted, a process killed from outside | yes | none; five at one step without progress stop the run |
| what can pass: storage, no progress, out of memory, bug | yes | `retry.max_retries`, refilled by progress |
| the same class and message at one step twice without progress | no | none |

Progress is a verified step above every earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTSIDE = frozenset({"preempted", "worker_died", "orphaned"})
MAX_SAME_KILLS = 5


@dataclass(frozen=True)
class Failure:
    """How one attempt ended."""

    failure_class: str
    message: str
    retry: bool
    """What the error tree says."""
    step: int
    """The last step that any attempt had finished by then."""
    verified: int
    """The newest step that any attempt had verified by then."""


@dataclass(frozen=True)
class Decision:
    retry: bool
    reason: str


def decide(history: list[Failure], max_retries: int) -> Decision:
    """Whether to try again after the last of these failures."""
    last = history[-1]
    if not last.retry:
        return Decision(False, f"{last.failure_class} cannot be cured by another attempt")
    # Failures before the newest verified step count no more: progress refills the budget.
    since = [failure for failure in history if failure.verified == last.verified]
    same = [f for f in since if (f.failure_class, f.message, f.step) == (last.failure_class, last.message, last.step)]
    if last.failure_class in OUTSIDE:
        if len(same) >= MAX_SAME_KILLS:
            return Decision(False, f"{last.failure_class} {len(same)} times after step {last.step} without progress")
        return Decision(True, f"{last.failure_class} uses up no budget")
    if len(same) > 1:
        return Decision(False, f"the same {last.failure_class} twice after step {last.step} without progress")
    used = sum(failure.failure_class not in OUTSIDE for failure in since)
    if used > max_retries:
        limit = f"retry.max_retries={max_retries}"
        return Decision(False, f"{used} failures since step {last.verified} was verified, {limit}")
    return Decision(True, f"failure {used} of at most {max_retries} retries since step {last.verified} was verified")
