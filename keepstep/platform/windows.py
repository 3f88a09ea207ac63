"""How long a flow run may say nothing before it counts as dead: all of it follows from two numbers, in seconds.

A window that is shorter than an outage of the API marks healthy runs as Crashed the moment that the API is back. So the
window covers the longest outage that the client itself sits out, and three heartbeats beside, of which one may be late
and one lost. Steps and saves are not part of it: heartbeats come from the flow's process, work is done in others.
"""

from __future__ import annotations

HEARTBEAT_S = 60
"""Prefect takes no fewer than 30."""
CLIENT_MAX_RETRIES = 8
"""The client waits 2, 4, … 2^8 s between its tries."""


def longest_outage_s(client_max_retries: int = CLIENT_MAX_RETRIES) -> int:
    """Seconds for which a client goes on trying to reach the API."""
    return sum(2**number for number in range(1, client_max_retries + 1))


def silence_window_s(heartbeat_s: int = HEARTBEAT_S, outage_s: int | None = None) -> int:
    """Seconds of silence after which a flow run counts as dead."""
    return 3 * heartbeat_s + (longest_outage_s() if outage_s is None else outage_s)
