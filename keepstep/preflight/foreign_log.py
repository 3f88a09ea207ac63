"""The settings that a log tells of: Keepstep's own `key=value` lines, or the dictionary that verl prints at its start.

Pure. For a run whose record is lost, or that another trainer began.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import yaml

MAX_DICTIONARY_LINES = 3000
_OURS = re.compile(r" INFO ([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(.*)$")
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\([A-Za-z_]\w*(?: pid=\d+)?[^)]*\)\s?")


def settings_in(text: str) -> dict[str, Any]:
    """Dotted key to value. What is said again later wins; what cannot be read is left out."""
    found: dict[str, Any] = {}
    lines = text.splitlines()
    for line in lines:
        if match := _OURS.search(line):
            try:
                found[match.group(1)] = yaml.safe_load(match.group(2))
            except yaml.YAMLError:
                continue
    return found or dict(flatten(_dictionary(lines)))


def _dictionary(lines: list[str]) -> dict[str, Any]:
    """The last dictionary with `actor_rollout_ref` that was pretty-printed over several lines."""
    plain = [_DECORATION.sub("", _DECORATION.sub("", line)) for line in lines]
    found: dict[str, Any] = {}
    for begin, line in enumerate(plain):
        if not line.startswith("{'"):
            continue
        for end in range(begin + 1, min(begin + MAX_DICTIONARY_LINES, len(plain)) + 1):
            if not plain[end - 1].rstrip().endswith("}"):
                continue
            try:
                value = ast.literal_eval("\n".join(plain[begin:end]))
            except (SyntaxError, ValueError):
                continue
            if isinstance(value, dict) and "actor_rollout_ref" in value:
                found = value
            break
    return found


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
