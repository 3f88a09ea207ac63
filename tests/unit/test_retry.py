"""Which failures are worth another attempt: a table (C154: kills do not use up the budget, progress refills it)."""

import pytest

from keepstep.retry import Failure, decide


def bug(step: int, verified: int, message: str = "boom") -> Failure:
    return Failure("bug", message, True, step, verified)


def kill(step: int, verified: int) -> Failure:
    return Failure("worker_died", "rollout: engine 0 died.", True, step, verified)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([Failure("config", "typo", False, 0, 0)], False),
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
    ],
)
def test_decision(history: list[Failure], expected: bool):
    assert decide(history, max_retries=3).retry is expected


def test_reason_is_said():
    assert decide([bug(7, 5), bug(7, 5)], 3).reason == "the same bug twice after step 7 without progress"
    assert decide([kill(7, 5)], 3).reason == "worker_died uses up no budget"
