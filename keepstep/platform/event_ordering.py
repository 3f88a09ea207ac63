"""Prefect's ordering of events, with a minute of patience instead of fifteen. Loaded by the Prefect server alone.

An event waits for the one that it says it follows, for as long as `PRECEDING_EVENT_LOOKBACK`. Two kinds of event that
are followed never come: Prefect tells nobody when a schedule makes a run (its Scheduled state, which Pending follows if
it comes within five minutes), and after a restart the server has forgotten what it had seen. With all that follows them
every automation waits, also the one that brings a crashed flow run back.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.server.events.ordering import memory

PATIENCE = timedelta(seconds=60)
"""Events of one run come within seconds of each other."""

# There is no setting for it; the module that orders events can be set, and is this one.
memory.PRECEDING_EVENT_LOOKBACK = PATIENCE
CausalOrdering = memory.CausalOrdering
