"""The last lines of a test run say what was looked at in a browser, or that nothing was."""

from __future__ import annotations

from pytest import TerminalReporter

from tests.browser.chromium import BINARY, KEPT, NO_BROWSER, SCREENSHOTS
from tests.integration.driver import REPOSITORY


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    if not BINARY:
        terminalreporter.write_line(f"browser: nothing was looked at, {NO_BROWSER}", yellow=True)
    elif KEPT:
        terminalreporter.write_line(f"browser: {len(KEPT)} screenshots in {SCREENSHOTS.relative_to(REPOSITORY)}/")
