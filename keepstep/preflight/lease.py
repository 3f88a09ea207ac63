"""Who holds a run, and waiting until nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable

from keepstep.attempts import Claim, claim
from keepstep.config.schema import RetryConfig
from keepstep.run import RunDir

POLL_S = 1.0
SAY_S = 60.0


def holder(run: RunDir, retry: RetryConfig) -> Claim:
    """What the newest attempt means for a start from here, now."""
    return claim(run, max(run.attempt_numbers(), default=0), retry.lease_timeout_s)


def wait_until_free(run: RunDir, retry: RetryConfig, say: Callable[[str], object]) -> None:
    """Wait up to `retry.wait_for_holder_s` for another attempt to end; one that still holds it refuses the start."""
    begin = time.monotonic()
    said = -SAY_S
    while not (found := holder(run, retry)).open and (waited_s := time.monotonic() - begin) < retry.wait_for_holder_s:
        if waited_s - said >= SAY_S:
            said = waited_s
            say(f"waiting for up to {retry.wait_for_holder_s - waited_s:.0f} s: {found.reason}")
        time.sleep(POLL_S)
