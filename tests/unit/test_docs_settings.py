"""Settings that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepstep.config.load import settings

DOCS = Path(__file__).parents[2] / "docs"
ROOTS = {key.partition(".")[0] for key in settings()}
NAMED = re.compile(rf"`((?:{'|'.join(sorted(ROOTS))})\.[\w.]+)[=`*]")


@pytest.mark.parametrize("name", ["tuning.md", "rewards.md"])
def test_settings_of_a_page_exist(name: str):
    found = named((DOCS / name).read_text())
    assert found and unknown(found) == []


def test_settings_in_the_last_column_of_the_migration_tables_exist():
    lines = (DOCS / "migrate.md").read_text().splitlines()
    found = named("\n".join(line.split(" | ")[-1] for line in lines if line.startswith("| ")))
    assert len(found) > 30, "the tables were read"
    assert unknown(found) == []


def named(text: str) -> list[str]:
    return NAMED.findall(text)


def unknown(names: list[str]) -> list[str]:
    known = settings()
    return [name for name in names if not any(key == name or key.startswith(f"{name}.") for key in known)]
