"""Settings that documents name exist, and have the defaults that are given for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepstep.config.load import settings
from keepstep.config.schema import RunConfig
from keepstep.preflight import contract
from tests.unit.documents import DOCUMENTS, ROOT

SECTIONS = {part for key in settings() for part in key.split(".")[:-1]}
NAMED = re.compile(rf"`((?:{'|'.join(sorted(SECTIONS))})\.[a-z_0-9.]*[a-z_0-9])(?=[=`*])")
"""In whole, or from any section on: `rollout.n`."""

NO_SETTINGS = {
    "reward_model.ground_truth": "a column",
    "data.pt": "a file of verl's",
    "model.safetensors": "a file",
    "trainer.actor": "the library's trainer",
    "trainer.loop": "the library's trainer",
    "custom_reward_function.source": "a field of the contract alone",
    "model.fingerprint": "a field of the contract alone",
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_of_a_page_exist(path: Path):
    """In migration tables only the last column has settings of ours; algorithm.md gives verl's and TRL's in columns."""
    text = path.read_text()
    if path.name in ("migrate.md", "algorithm.md"):
        text = "\n".join(line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| "))
    assert unknown(NAMED.findall(text)) == []


def test_the_tables_were_read():
    assert len(NAMED.findall((ROOT / "docs" / "migrate.md").read_text())) > 50
    assert unknown(["retry.max_retrys", "rollout.m", "retry.max_retries", "rollout.n"]) == [
        "retry.max_retrys",
        "rollout.m",
    ]


def test_what_is_called_no_setting_is_none_and_is_still_named():
    text = "".join(path.read_text() for path in DOCUMENTS)
    for name in NO_SETTINGS:
        assert name not in settings() and f"`{name}`" in text, name
    of_contract = [name for name, why in NO_SETTINGS.items() if "contract" in why]
    assert all(contract.class_of(name) for name in of_contract)


def test_defaults_in_brackets_are_those_of_the_schema():
    """`checkpoint.keep_last` (3)."""
    found = []
    for path in DOCUMENTS:
        if path.name in ("migrate.md", "algorithm.md"):
            continue  # The other trainers' defaults.
        flat = re.sub(r"\s+", " ", path.read_text())
        found += [(path.name, *pair) for pair in re.findall(r"`([a-z_0-9]+\.[a-z_0-9.]+)`(?:-th)? \(([\d.]+)\)", flat)]
    assert len(found) >= 8
    wrong = [(page, key, given, default(key)) for page, key, given in found if float(given) != default(key)]
    assert wrong == []


def test_time_limits_of_the_table_are_the_defaults():
    text = (ROOT / "docs" / "failures.md").read_text().partition("## Time limits")[2]
    rows = re.findall(r"^\| (`[^|]+`) \| (\d+) s", text, re.MULTILINE)
    found = {key: float(seconds) for cell, seconds in rows for key in re.findall(r"`([\w.]+)`", cell)}
    assert found.keys() >= {"timeouts.step_s", "s3.final_timeout_s", "checkpoint.verify_timeout_s"} and len(found) >= 10
    assert found == {key: default(key) for key in found}


def default(key: str) -> Any:
    section: Any = RunConfig
    *sections, last = key.split(".")
    for name in sections:
        section = section.model_fields[name].annotation
    return section.model_fields[last].get_default(call_default_factory=True)


def unknown(names: list[str]) -> list[str]:
    """Those that are neither a setting nor a section, in whole or from one of its sections on."""
    known = [f".{key}." for key in settings()]
    return [name for name in names if name not in NO_SETTINGS and not any(f".{name}." in key for key in known)]
