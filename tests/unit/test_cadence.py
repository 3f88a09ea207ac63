"""Which saves go to the store: written out by hand."""

import pytest

from keepstep.checkpoint.cadence import due, last_due, upload_due


@pytest.mark.parametrize(
    ("save_freq", "last", "expected"),
    [(20, 200, [100, 200]), (30, 240, [120, 210, 240]), (100, 350, [100, 200, 300]), (250, 600, [250, 500])],
)
def test_first_save_at_or_after_each_interval(save_freq: int, last: int, expected: list[int]):
    saves = range(save_freq, last + 1, save_freq)
    found = [step for step in saves if upload_due(step, save_freq=save_freq, upload_interval=100, last_step=last)]
    assert found == expected


def test_last_step_always_goes_up():
    assert upload_due(37, save_freq=20, upload_interval=100, last_step=37)
    assert upload_due(37, save_freq=-1, upload_interval=100, last_step=37)


def test_due():
    assert [step for step in range(1, 8) if due(step, 3)] == [3, 6]
    assert not any(due(step, -1) for step in range(1, 8))


def test_last_due():
    assert [last_due(step, 3) for step in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert {last_due(step, -1) for step in range(8)} == {0}
