"""What is quoted of an error in one line."""

from __future__ import annotations

import pytest

from keepstep.errors import first_line, last_line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("torn\nhere"), "torn"),
        (ValueError("\n  torn \nhere"), "torn"),
        (ValueError(), "ValueError"),
        (ValueError("  \n"), "ValueError"),
    ],
)
def test_the_first_line_says_something_of_every_error(error: Exception, expected: str):
    assert first_line(error) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Traceback\n  …\nKeyError: 1\n\n", "KeyError: 1"),
        (ValueError("torn\nhere"), "here"),
        ("", "no word"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_traceback_ends_with_its_cause(said: object, expected: str):
    assert last_line(said) == expected
