"""Which checkpoint a retry resumes from: tables."""

import pytest

from keepstep.checkpoint.select import Candidate, order


def first(steps: list[int], **options) -> int:
    settings = {"policy": "prefer_multiple", "prefer_multiple": 100, "max_rewind_steps": None} | options
    return order([Candidate(step, "local") for step in steps], **settings)[0][0].step


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        ([20, 40, 60], {}, 60),
        ([9, 10, 200], {}, 200),  # C80: numbers, not text
        ([9900, 10000, 10100], {}, 10100),  # C56
        ([80, 100, 120, 140], {}, 100),
        ([100, 180, 200, 240], {}, 200),
        ([80, 100, 120, 140], {"policy": "latest"}, 140),
        ([80, 100, 120, 140], {"prefer_multiple": 60}, 120),
        ([80, 100, 120, 140], {"max_rewind_steps": 40}, 100),
        ([80, 100, 120, 140], {"max_rewind_steps": 39}, 140),
        ([80, 100, 120, 140], {"stuck_at": 100}, 140),
        ([100, 140, 200, 220], {"stuck_at": 100}, 200),
        ([0, 20], {}, 20),
        ([100, 120, 130], {"final_step": 130}, 130),
    ],
)
def test_first_choice(steps: list[int], options: dict, expected: int):
    """C80, C82: the newest preferred multiple, unless the policy, the bound or the no-loop rule says otherwise."""
    assert first(steps, **options) == expected


def test_whole_order_falls_back_to_the_newest_of_the_rest():
    found = order(
        [Candidate(step, "local") for step in (100, 120, 200, 220)],
        policy="prefer_multiple", prefer_multiple=100, max_rewind_steps=None,
    )  # fmt: skip
    assert [candidate.step for candidate, _ in found] == [200, 100, 220, 120]


def test_local_copy_comes_before_the_stores():
    found = order(
        [Candidate(40, "s3"), Candidate(40, "local"), Candidate(20, "local")],
        policy="latest", prefer_multiple=100, max_rewind_steps=None,
    )  # fmt: skip
    assert [(c.step, c.source) for c, _ in found] == [(40, "local"), (40, "s3"), (20, "local")]
