"""Attempt numbers in the store: who may write into a run whose machines share nothing else.

`attempts/<n>.json` {"attempt", "time", "owner"} is made once, by a conditional write. The highest number owns the run,
and a number belongs to the owner that is written in it.

Order of a start (`controller.attempt.acquire`): the number is taken in the local folder first, since only that tells
whether its holder still lives, then here. A number that another machine has taken here in between is given back and
the next one tried. A store that does not answer does not hold a start up: the number is then taken at the first upload,
which fails as fenced if another machine was quicker.

Before a manifest is written or anything is deleted, `check` looks again.
"""

from __future__ import annotations

import json
import re
from typing import Any

from keepstep.errors import FencedError
from keepstep.events.log import utc_now
from keepstep.run import RunDir, read_json
from keepstep.storage.protocol import ObjectStore

_KEY = re.compile(r"attempts/([1-9][0-9]*)\.json")


def highest(store: ObjectStore) -> int:
    """Highest attempt number that the store knows; 0: none."""
    found = (_KEY.fullmatch(key) for key, _ in store.list_objects("attempts/"))
    return max((int(match.group(1)) for match in found if match), default=0)


def claim(store: ObjectStore, run: RunDir, number: int) -> bool:
    """Take a number that this run's folder has given out; False: another machine has it."""
    owner = _local_owner(run, number)
    record = {"attempt": number, "time": utc_now(), "owner": owner}
    store.put_bytes(_key(number), json.dumps(record).encode(), if_absent=True)
    # Read in any case: a store that ignores the condition lets the last writer win.
    return _owner(store, number) == owner


def check(store: ObjectStore, run: RunDir, number: int) -> None:
    """
    Raises:
        FencedError: a higher number is there, or this one belongs to another machine.
    """
    newest = highest(store)
    if newest > number:
        raise FencedError(
            f"Attempt {number} of {run.root} is stale: attempt {newest} in {store.where} took the run over."
        )
    owner = _owner(store, number)
    if owner == _local_owner(run, number):
        return
    if owner is None:
        raise FencedError(
            f"Attempt {number} of {run.root} is not in {store.where}, so nothing tells whose the run is there.",
            "The next attempt that uploads takes a number there.",
        )
    raise FencedError(
        f"Attempt {number} of {store.where} belongs to another machine than {run.root}.",
        "Start again: the next start takes a number of its own.",
    )


def _key(number: int) -> str:
    return f"attempts/{number}.json"


def _local_owner(run: RunDir, number: int) -> dict[str, Any] | None:
    try:
        owner: dict[str, Any] = read_json(run.attempt(number))["owner"]
    except (FileNotFoundError, KeyError):
        return None
    return owner


def _owner(store: ObjectStore, number: int) -> Any:
    data = store.get_bytes(_key(number))
    try:
        return json.loads(data or b"{}").get("owner")
    except (ValueError, AttributeError):
        return None
