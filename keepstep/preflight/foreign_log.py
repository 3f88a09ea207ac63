"""The settings that a log tells of: Keepstep's own `key=value` lines, or the dictionary that verl prints at its start.

Pure. For a run whose record is lost, or that another trainer began.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import yaml

from keepstep.config.load import leaves

MAX_DICTIONARY_LINES = 3000
_OURS = re.compile(r" INFO ([a-z_0-9]+(?:\.[a-z_0-9]+)+)=(.*)$")
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\([A-Za-z_]\w*(?: pid=\d+)?[^)]*\)\s?")


def settings_in(text: str) -> dict[str, Any]:
    """Dotted key to value. What is said again later wins; what cannot be read is left out."""
    found: dict[str, Any] = {}
    lines = text.splitlines()
    for line in lines:
        if match := _OURS.search(line):
            found[match.group(1)] = _value(match.group(2))
    return found or dict(leaves(_dictionary(lines)))


def _value(text: str) -> Any:
    """As it was written: JSON, since YAML reads 5e-07 as a text; else YAML, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


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
