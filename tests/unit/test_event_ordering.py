"""What the Prefect server does with an event that follows one that never came."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from keepstep.platform import servers

# A process of its own: the server's module is changed by being loaded.
SCRIPT = """
import asyncio, json, uuid
from datetime import UTC, datetime, timedelta
from prefect.server.events import ordering
from prefect.server.events.schemas.events import ReceivedEvent, Resource

async def main():
    found = ordering.get_triggers_causal_ordering()
    handled = []

    async def handle(event, depth=0):
        async with found.preceding_event_confirmed(handle, event, depth):
            handled.append(event.event)

    def event(name, seconds_ago, follows):
        return ReceivedEvent(
            id=uuid.uuid4(), event=name, resource=Resource({"prefect.resource.id": "prefect.flow-run.x"}),
            occurred=datetime.now(UTC), received=datetime.now(UTC) - timedelta(seconds=seconds_ago), follows=follows)

    pending = event("Pending", 62, uuid.uuid4())
    pending.received = datetime.now(UTC)
    running = event("Running", 0, pending.id)
    crashed = event("Crashed", 0, running.id)
    for one in (pending, running, crashed):
        try:
            await handle(one)
        except ordering.EventArrivedEarly:
            pass
    early = list(handled)
    # A minute later.
    found._waitlist[pending.id] = pending.received = datetime.now(UTC) - timedelta(seconds=61)
    for lost in await found.get_lost_followers():
        await handle(lost)
    print(json.dumps([early, handled]))

asyncio.run(main())
"""


def test_events_wait_a_minute_for_one_that_was_never_told():
    """A schedule's run that crashes minutes after it was made comes back all the same."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | servers.EVENT_ORDERING,
    )  # fmt: skip
    early, handled = json.loads(done.stdout.splitlines()[-1])
    assert early == []
    assert handled == ["Pending", "Running", "Crashed"]
