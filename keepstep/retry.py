"""Whether another attempt is worth it, when, and out of which budget. Pure: ends of attempts in, decision with its
reason out.

The error tree (`keepstep.errors`) names the budget of every class; the table of all classes stands in docs/failures.md.
Progress is a verified step above every earlier one: what failed before it counts no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.config.schema import RetryConfig
from keepstep.errors import FAILURES, KILLS, NEVER, ONCE, KeepstepError, budget_of

MAX_SAME_KILLS = 5
MAX_SAME_FAILURES = 1
MAX_ONCE = 1
SILENT_END = "the attempt ended without a word"

RETRIES_EXHAUSTED = "RetriesExhausted"
SAME_FAILURE = "SameFailure"
NOT_RETRYABLE = "NotRetryable"


@dataclass(frozen=True)
class AttemptEnd:
    """How one attempt ended and how far it had come."""

    number: int
    outcome: Mapping[str, Any]
    """As in attempts/<n>.json; empty: it was killed before it could tell."""
    last_step: int | None
    """The last step that it finished."""
    verified: int | None
    """The newest step that it verified."""


@dataclass(frozen=True)
class Failure:
    """How one attempt failed."""

    failure_class: str
    message: str
    step: int
    """The last step that was finished by then."""
    verified: int
    """The newest step that any attempt had verified by then."""

    @property
    def budget(self) -> str:
        return budget_of(self.failure_class)


@dataclass(frozen=True)
class Decision:
    retry: bool
    reason: str
    delay_s: float = 0.0
    name: str = ""
    """Of the state in which the run ends when there is no other attempt."""


def failures(ends: Iterable[AttemptEnd]) -> list[tuple[int, Failure]]:
    """(attempt, failure) of those that did not finish, in order."""
    found: list[tuple[int, Failure]] = []
    step = verified = 0
    for end in ends:
        step = step if end.last_step is None else end.last_step
        verified = max(verified, end.verified or 0)
        if end.outcome.get("status") == "finished":
            continue
        failure_class = str(end.outcome.get("class", "worker_died"))
        message = str(end.outcome.get("message", SILENT_END))
        found.append((end.number, Failure(failure_class, message, step, verified)))
    return found


def decide(history: list[Failure], retry: RetryConfig) -> Decision:
    """Whether to try again after the last of these failures."""
    last = history[-1]
    if last.budget == NEVER:
        reason = f"{last.failure_class} cannot be cured by another attempt"
        return Decision(False, reason, name=NOT_RETRYABLE)
    since = [failure for failure in history if failure.verified == last.verified]
    same = [f for f in since if (f.failure_class, f.message, f.step) == (last.failure_class, last.message, last.step)]
    if last.budget == KILLS:
        if len(same) >= MAX_SAME_KILLS:
            reason = f"{last.failure_class} {len(same)} times after step {last.step} without progress"
            return Decision(False, reason, name=SAME_FAILURE)
        # The first comes from outside as a rule and is made good at once.
        return Decision(True, f"{last.failure_class} uses up no budget", _delay([0.0, *retry.delays_s], len(same)))
    if len(same) > MAX_SAME_FAILURES:
        reason = f"the same {last.failure_class} twice after step {last.step} without progress"
        return Decision(False, reason, name=SAME_FAILURE)
    if last.budget == ONCE and sum(failure.failure_class == last.failure_class for failure in since) > MAX_ONCE:
        reason = f"{last.failure_class} is tried again once, since step {last.verified} was verified"
        return Decision(False, reason, name=RETRIES_EXHAUSTED)
    used = sum(failure.budget in (FAILURES, ONCE) for failure in since)
    if used > retry.max_retries:
        reason = f"{used} failures since step {last.verified} was verified, retry.max_retries={retry.max_retries}"
        return Decision(False, reason, name=RETRIES_EXHAUSTED)
    reason = f"failure {used} of at most {retry.max_retries} retries since step {last.verified} was verified"
    return Decision(True, reason, _delay(retry.delays_s, used))


def failure_of(error: KeepstepError, step: int, verified: int) -> Failure:
    """A failure that no attempt recorded: the start itself was refused."""
    return Failure(error.failure_class, error.message, step, verified)


def pauses_s(retry: RetryConfig) -> Iterator[float]:
    """The waits before each of `retry.max_retries` tries of something that no attempt has begun yet."""
    return (_delay(retry.delays_s, number + 1) for number in range(retry.max_retries))


def _delay(delays_s: list[float], number: int) -> float:
    """The wait after the `number`-th, from 1; the last one repeats."""
    return delays_s[min(number, len(delays_s)) - 1] if delays_s else 0.0
