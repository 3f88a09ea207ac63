"""What a failing test started ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.driver import Driver


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """A test that fails in the middle of a run ends it: the next one needs both cores."""
    before = len(Driver.started)
    yield
    for driver in Driver.started[before:]:
        driver.end()
