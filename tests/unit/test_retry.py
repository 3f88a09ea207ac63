"""Which failures are worth another attempt: a table (C154: kills do not use up the budget, progress refills it)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keepstep.storage.protocol  # noqa: F401  (classes of the tree that stand there)
from keepstep import errors
from keepstep.config.schema import RetryConfig
from keepstep.retry import AttemptEnd, Failure, decide, failures

RETRY = RetryConfig(max_retries=3, delays_s=[2.0, 10.0, 30.0])
DOCUMENT = Path(__file__).parents[2] / "docs" / "failures.md"


def bug(step: int, verified: int, message: str = "boom") -> Failure:
    return Failure("bug", message, step, verified)


def kill(step: int, verified: int) -> Failure:
    return Failure("worker_died", "rollout: engine 0 died.", step, verified)


def no_memory(step: int, verified: int, message: str = "update: out of memory") -> Failure:
    return Failure("out_of_memory", message, step, verified)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([Failure("config", "typo", 0, 0)], False),
        ([kill(7, 5)], True),
        ([kill(step, 5) for step in range(5, 25)], True),
        ([kill(7, 5)] * 4, True),
        ([kill(7, 5)] * 5, False),
        ([bug(7, 5)], True),
        ([bug(7, 5), bug(7, 5)], False),
        ([bug(7, 5, "a"), bug(7, 5, "b")], True),
        ([bug(7, 5), bug(8, 5), bug(9, 5)], True),
        ([bug(7, 5), bug(8, 5), bug(9, 5), bug(6, 5)], False),
        ([bug(7, 5), bug(8, 5), bug(9, 5), bug(12, 10)], True),
        ([bug(7, 5), kill(8, 5), kill(9, 5), kill(6, 5), bug(8, 5)], True),
        ([bug(7, 5), bug(12, 10), bug(7, 10)], True),
        ([no_memory(7, 5)], True),
        ([no_memory(7, 5), no_memory(8, 5)], False),
        ([no_memory(7, 5), no_memory(12, 10)], True),
        ([no_memory(7, 5), bug(8, 5)], True),
        ([bug(6, 5), bug(7, 5), bug(8, 5), no_memory(9, 5)], False),
        ([Failure("of_another_release", "?", 7, 5)], True),
    ],
)
def test_decision(history: list[Failure], expected: bool):
    assert decide(history, RETRY).retry is expected


def test_reason_and_state_are_said():
    same = decide([bug(7, 5), bug(7, 5)], RETRY)
    assert (same.name, same.reason) == ("SameFailure", "the same bug twice after step 7 without progress")
    spent = decide([bug(step, 5) for step in range(6, 10)], RETRY)
    assert (spent.name, spent.reason) == (
        "RetriesExhausted", "4 failures since step 5 was verified, retry.max_retries=3",
    )  # fmt: skip
    assert decide([Failure("data", "rows", 0, 0)], RETRY).name == "NotRetryable"
    assert decide([kill(7, 5)], RETRY).reason == "worker_died uses up no budget"


@pytest.mark.parametrize(
    ("history", "delay_s"),
    [
        ([kill(7, 5)], 0.0),
        ([kill(7, 5)] * 2, 2.0),
        ([kill(7, 5)] * 4, 30.0),
        ([kill(7, 5), kill(8, 5)], 0.0),
        ([bug(7, 5)], 2.0),
        ([bug(7, 5), bug(8, 5)], 10.0),
        ([bug(7, 5), kill(8, 5), bug(8, 5)], 10.0),
        ([bug(7, 5), bug(8, 5), bug(12, 10)], 2.0),
    ],
)
def test_wait_before_the_next_attempt(history: list[Failure], delay_s: float):
    assert decide(history, RETRY).delay_s == delay_s


def test_failures_are_read_from_the_ends_of_the_attempts():
    """An attempt that was killed says nothing; one that finished failed not; steps and progress carry over."""
    ends = [
        AttemptEnd(1, {"status": "failed", "class": "bug", "message": "boom"}, 7, 5),
        AttemptEnd(2, {}, None, None),
        AttemptEnd(3, {"status": "preempted", "class": "preempted", "message": "Asked to leave."}, 6, 6),
        AttemptEnd(4, {"status": "finished", "step": 40}, 40, 40),
    ]
    assert failures(ends) == [
        (1, Failure("bug", "boom", 7, 5)),
        (2, Failure("worker_died", "the attempt ended without a word", 7, 5)),
        (3, Failure("preempted", "Asked to leave.", 6, 6)),
    ]


def test_the_document_has_the_table_that_the_code_reads():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \| (\d+) \|$", DOCUMENT.read_text(), flags=re.M)
    tree = {name: cls for name, cls in errors.classes().items() if cls is not errors.KeepstepError}
    assert {name: (budget, int(code)) for name, budget, code in rows} == {
        name: (cls.budget, cls.exit_code) for name, cls in tree.items()
    }
    assert not [name for name, cls in tree.items() if "retry" in vars(cls)], "the budget alone says it"
