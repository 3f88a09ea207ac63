"""Prefect's automations, installed once by name: a second one of the same name would act a second time.

python -m keepstep.platform.automations FILE [--block TYPE/NAME]      into the server of PREFECT_API_URL
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from keepstep.errors import ConfigError, KeepstepError
from keepstep.platform.api import PrefectApi

SILENCE_VARIABLE = "KEEPSTEP_SILENCE_S"
"""Replaces the window of silence, in seconds; for tests, whose outages last no minutes."""

NOTIFICATION = "send-notification"

Record = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What is to be done for one automation: `create`, `update`, `delete` (of one too many) or `keep`."""

    action: str
    name: str
    id: str | None
    wanted: Record | None


def load(path: Path, silence_s: float | None = None) -> list[Record]:
    """The automations of a file, with the window of silence replaced where one is given."""
    automations: list[Record] = yaml.safe_load(path.read_text(encoding="utf-8"))["automations"]
    return [automation if silence_s is None else _with_window(automation, silence_s) for automation in automations]


def with_block(automations: list[Record], block_id: str) -> list[Record]:
    """The automations, with every notification sent by this block. Pure."""

    def filled(action: Record) -> Record:
        return action | {"block_document_id": block_id} if action["type"] == NOTIFICATION else action

    return [one | {"actions": [filled(action) for action in one["actions"]]} for one in automations]


def block_id(api: PrefectApi, name: str) -> str:
    """Id of the block `<type>/<name>` of the server, as `Block.load` takes it.

    Raises:
        ConfigError: there is none.
    """
    block_type, _, own = name.partition("/")
    types = api.ask("POST", "block_types/filter", {"block_types": {"slug": {"any_": [block_type]}}})
    found = api.ask("GET", f"block_types/slug/{quote(block_type, safe='')}/block_documents") if types else []
    for block in found:
        if block["name"] == own:
            return str(block["id"])
    there = ", ".join(f"{block_type}/{block['name']}" for block in found) or "none of this type"
    raise ConfigError(
        f"{api.url} has no block {name} (there: {there}).", f"prefect block create {block_type}, then this again."
    )


def silence_of_environment() -> float | None:
    """
    Raises:
        ConfigError: the variable holds no positive number.
    """
    text = os.environ.get(SILENCE_VARIABLE)
    try:
        silence_s = None if text is None else float(text)
    except ValueError:
        silence_s = 0.0
    if silence_s is not None and not 0 < silence_s < float("inf"):
        raise ConfigError(f"{SILENCE_VARIABLE}={text} is no number of seconds.", "Unset it.")
    return silence_s


def silence_s(automations: list[Record]) -> float:
    """The window of silence that these automations have."""
    return max(float(one["trigger"]["within"]) for one in automations if _waits_for_silence(one))


def changes(found: list[Record], wanted: list[Record]) -> list[Change]:
    """What makes the automations of the server the wanted ones. Pure; those of other names are not touched.

    An equal one is kept, since an update forgets which runs it is waiting for.
    """
    result = []
    for automation in wanted:
        name = automation["name"]
        namesakes = [one for one in found if one["name"] == name]
        if not namesakes:
            result.append(Change("create", name, None, automation))
            continue
        best = next((one for one in namesakes if holds(one, automation)), namesakes[0])
        result.append(Change("keep" if holds(best, automation) else "update", name, best["id"], automation))
        result += [Change("delete", name, one["id"], None) for one in namesakes if one is not best]
    return result


def holds(found: Any, wanted: Any) -> bool:
    """Whether everything that is wanted stands in what was found, which has defaults beside it."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and holds(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return False
        if all(isinstance(one, str) for one in wanted):
            # Sets of event names come back in any order.
            return sorted(found) == sorted(wanted)
        return all(holds(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)


def install(api: PrefectApi, wanted: list[Record]) -> list[Change]:
    """Make the changes and return them."""
    names = [automation["name"] for automation in wanted]
    found = api.ask("POST", "automations/filter", {"automations": {"name": {"any_": names}}, "limit": 200})
    todo = changes(found, wanted)
    for change in todo:
        if change.action == "create":
            api.ask("POST", "automations/", change.wanted)
        elif change.action == "update":
            api.ask("PUT", f"automations/{change.id}", change.wanted)
        elif change.action == "delete":
            api.ask("DELETE", f"automations/{change.id}")
    return todo


def _with_window(automation: Record, silence_s: float) -> Record:
    changed = copy.deepcopy(automation)
    if _waits_for_silence(automation):
        changed["trigger"]["within"] = silence_s
    return changed


def _waits_for_silence(automation: Record) -> bool:
    """Whether it acts when a run says nothing; the wait before a crashed run is queued again is no such one."""
    trigger = automation["trigger"]
    return trigger["posture"] == "Proactive" and "prefect.flow-run.Crashed" not in trigger["after"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description="Install automations into the server of PREFECT_API_URL."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the automations, as YAML")
    parser.add_argument(
        "--block", metavar="TYPE/NAME", help="the block that sends notifications: slack-webhook/keepstep"
    )
    args = parser.parse_args(arguments)
    if not args.file.is_file():
        parser.error(f"{args.file}: no such file")
    try:
        for change in install_file(PrefectApi.of_environment(), args.file, args.block):
            print(f"{change.action:8}{change.name}")
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def install_file(api: PrefectApi, file: Path, block: str | None) -> list[Change]:
    """Install what `file` holds; `block` is the notification block of those that notify, `<type>/<name>`.

    Raises:
        ConfigError: no block is given to notifications, or there is no such block.
    """
    wanted = load(file, silence_of_environment())
    notifies = any(action["type"] == NOTIFICATION for one in wanted for action in one["actions"])
    if notifies and block is None:
        raise ConfigError(
            f"{file}: its notifications need a block.", "Give --block TYPE/NAME, e.g. slack-webhook/keepstep."
        )
    return install(api, with_block(wanted, block_id(api, block)) if notifies and block else wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
