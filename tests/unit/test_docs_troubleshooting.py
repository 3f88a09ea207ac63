"""docs/troubleshooting.md quotes messages: each stands in the source, in an error of the class that is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

import keepstep.storage.protocol  # noqa: F401  (classes of the tree that stand there)
from keepstep import errors
from tests.unit.documents import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = [path for room in ("keepstep", "tasks", "flows") for path in sorted((ROOT / room).rglob("*.py"))]
MISSING = "\0"
"""Stands for what a message fills in."""


@dataclass(frozen=True)
class Row:
    message: str
    failure_class: str
    """Empty: a part of a message, of whatever class."""
    remedy: str


def rows() -> list[Row]:
    found = re.findall(r"^\| `([^`]+)` \| (?:`(\w+)`)? ?\| (.+) \|$", TEXT, re.MULTILINE)
    return [Row(*cells) for cells in found]


@dataclass(frozen=True)
class Said:
    text: str
    """With `MISSING` for what is filled in."""
    failure_class: str
    """Of the error that it is in; empty: it is put together before the error is raised."""
    raised_beside: frozenset[str]
    """Classes of the errors that its module raises."""


@cache
def all_said() -> list[Said]:
    """Every string of the source but for docstrings."""
    found = []
    for path in SOURCES:
        pairs = list(_strings(ast.parse(path.read_text()), ""))
        beside = frozenset(failure_class for _, failure_class in pairs)
        found += [Said(text, failure_class, beside) for text, failure_class in pairs]
    return found


def _strings(node: ast.AST, failure_class: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, failure_class
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else MISSING for part in node.values]
        yield "".join(map(str, parts)), failure_class
        return
    inner = _class_of(node.func) if isinstance(node, ast.Call) else ""
    for child in ast.iter_child_nodes(node):
        yield from _strings(child, inner or failure_class)


def _class_of(function: ast.expr) -> str:
    """The failure class that a call makes an error of, "" for any other call."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return {cls.__name__: failure_class for failure_class, cls in errors.classes().items()}.get(name, "")


def said(message: str, failure_class: str) -> bool:
    """Whether a string of the source begins with this quotation, whose `…` are what it fills in or what is cut."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    return any(
        pattern.match(one.text)
        for one in all_said()
        if not failure_class
        or one.failure_class == failure_class
        or (not one.failure_class and failure_class in one.raised_beside)
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.message[:60])
def test_a_quoted_message_stands_in_the_source(row: Row):
    longest = max(row.message.split("…"), key=len)
    assert len(longest.strip(" .:()`")) >= 4, "too little is quoted to tell it from others"
    assert said(row.message, row.failure_class), f"no {row.failure_class or 'string'} says {row.message!r}"


def test_a_message_that_is_worded_otherwise_or_of_another_class_is_found():
    assert said("… is held: ….", "held")
    assert not said("… is kept: ….", "held")
    assert not said("… is held: ….", "contract")
    assert not said("held: … is ….", "held"), "pieces in another order"
    assert not said("is held: ….", "held"), "the beginning is not what is printed first"


def test_the_page_was_read_and_tables_have_no_other_rows():
    lines = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert len(rows()) == len(lines) > 60
    assert len({row.message for row in rows()}) == len(rows())


def test_every_exit_code_has_its_classes():
    """C154: whoever knows only the code, or only the class, finds the section."""
    table = re.findall(r"^\| (\d+) \| [^|]* \| ([^|]*)\|", TEXT, re.MULTILINE)
    found = {int(code): set(re.findall(r"`(\w+)`", cell)) for code, cell in table}
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    expected = {code: {name for name, cls in errors.classes().items() if cls.exit_code == code} for code in codes}
    assert found == expected
