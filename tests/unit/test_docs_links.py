"""What a document points to is there: pages, and files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.documents import DOCUMENTS, ROOT

PAGES = [*DOCUMENTS, ROOT / "CHANGELOG.md"]
ROOMS = ("benchmarks", "configs", "deployments", "docs", "flows", "keepstep", "tasks", "tests")


def targets(path: Path) -> list[Path]:
    """What links point to, and names in code that are files (with a dot) or folders (with a slash at the end)."""
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", text)]
    named = re.findall(rf"`((?:{'|'.join(ROOMS)})/(?:[\w/-]+\.\w+|[\w/-]*/))`", text)
    return links + [ROOT / name for name in named]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_a_page_points_to_is_there(path: Path):
    missing = [str(target.relative_to(ROOT)) for target in targets(path) if not target.exists()]
    assert missing == []


def test_every_page_is_reached_from_the_readme():
    text = (ROOT / "README.md").read_text()
    assert [path.name for path in DOCUMENTS if path.parent.name == "docs" and f"docs/{path.name}" not in text] == []
