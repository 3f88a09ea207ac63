"""The commands of the documents: those in fences, and those that stand as code in a sentence or a table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

INLINE = ("keepstep", "make", "prefect", "python", "pip", "kubectl")
"""Programs whose name makes code in a sentence a command."""

NO_COMMANDS = {("docs/unattended.md", "heartbeat")}
"""(document, first word) of fences without commands that bear no label; any other such fence is labelled `text`."""


FENCE = re.compile(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """One command as a document has it, cut as a shell would cut it; assignments before it are left out."""

    document: str
    line: int
    words: tuple[str, ...]
    inline: bool

    def __str__(self) -> str:
        return f"{self.document}:{self.line} {' '.join(self.words)}"


def commands() -> list[Command]:
    """Every command of every document, and of the comments that configurations begin with."""
    found = [command for path in DOCUMENTS for command in in_document(path)]
    return found + [command for path in CONFIGS for command in in_comments(path)]


def in_document(path: Path) -> Iterator[Command]:
    name, text = str(path.relative_to(ROOT)), path.read_text()
    lines = text.splitlines()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        first, end = token.map or (0, 0)
        unlabelled = token.type == "fence" and token.info in ("", "sh")
        if unlabelled and (name, token.content.split()[0]) not in NO_COMMANDS:
            yield from _of_shell(name, first + 2, token.content)
        for child in token.children or []:
            if child.type == "code_inline" and _is_command(child.content):
                line = next((n for n in range(first, end) if child.content in lines[n]), first)
                yield Command(name, line + 1, _words(child.content), inline=True)


def files_of_the_example(folder: Path) -> None:
    """Write the files of docs/bring-your-own.md: fences whose first line is a comment with the file's name."""
    found = FENCE.findall((ROOT / "docs" / "bring-your-own.md").read_text())
    assert {name for name, _ in found} == {"make_data.py", "reward.py", "mine.yaml"}
    for name, content in found:
        (folder / name).write_text(content)


def in_comments(path: Path) -> Iterator[Command]:
    """Commands of a configuration: comments that are indented, up to two spaces, behind which an explanation stands."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("#   "):
            yield from _of_shell(str(path.relative_to(ROOT)), number, line.removeprefix("#   ").partition("  ")[0])


def _is_command(code: str) -> bool:
    words = _words(code)
    return len(words) > 1 and words[0] in INLINE


def _of_shell(document: str, first: int, text: str) -> Iterator[Command]:
    """The commands of a script: one may span lines, by a backslash or by a quote that is open."""
    begun, at = "", first
    for number, line in enumerate(text.splitlines(), start=first):
        at = at if begun else number
        begun += f"{line}\n"
        if line.endswith("\\") or not _is_whole(begun):
            continue
        yield from _each(document, at, begun)
        begun = ""
    assert not begun.strip(), f"{document}:{at}: a quote is left open"


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _each(document: str, line: int, text: str) -> Iterator[Command]:
    """The commands of one logical line, and of the script that one of them hands to a shell."""
    for words in _split(text):
        yield Command(document, line, words, inline=False)
        if words[-3:-1] == ("sh", "-c"):
            yield from _each(document, line, words[-1])


def _words(code: str) -> tuple[str, ...]:
    return next(_split(code), ()) if _is_whole(code) else tuple(code.split())


def _split(text: str) -> Iterator[tuple[str, ...]]:
    """Words of each command, as a shell has them: without comments, and without assignments before a program."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="&;")
    lexer.whitespace_split = True
    words = list(lexer)
    while words:
        end = next((number for number, word in enumerate(words) if word in ("&&", ";")), len(words))
        program = next((number for number in range(end) if not re.fullmatch(r"[A-Z_]+=.*", words[number])), end)
        if program < end:
            yield tuple(words[program:end])
        words = words[end + 1 :]
