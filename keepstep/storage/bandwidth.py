"""A limit on bytes per second over all requests of a store."""

from __future__ import annotations

import asyncio


class Bandwidth:
    """Hands out the wire in turns, on one event loop.

    Each transfer waits until those before it would be through at the rate, then goes at full speed: the limit holds on
    average over a few parts, not within one.

    Args:
        bytes_per_s: None: no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> float:
        """Wait for this transfer's turn; returns the seconds waited."""
        if self._rate is None or not num_bytes:
            return 0.0
        now = asyncio.get_running_loop().time()
        turn = max(now, self._free_at)
        self._free_at = turn + num_bytes / self._rate
        await asyncio.sleep(turn - now)
        return turn - now
