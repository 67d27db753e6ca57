"""The fenced blocks of the project's pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
BLOCK = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$")


class Block(NamedTuple):
    """One fenced block. ``language`` may be empty."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page} [{self.language}] {self.first[:60]}"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    name = str(page.relative_to(ROOT))
    for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(name, language, text)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


class Console(NamedTuple):
    """The commands of a console block, each as its words, and the lines of output between them."""

    commands: list[list[str]]
    output: list[str]


def console(text: str) -> Console:
    """Split a console block. A command may continue behind a backslash or inside quotes."""
    commands: list[list[str]] = []
    output: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            output += [line] * bool(line.strip())
            continue
        shown = line[2:]
        while shown.endswith("\\") or _is_open(shown):
            shown = f"{shown.removesuffix(chr(92))}\n{next(lines)}"
        commands += _simple(shown)
    return Console(commands, output)


def _is_open(shown: str) -> bool:
    """Return whether a quote is not closed yet."""
    try:
        shlex.split(shown, comments=True)
    except ValueError:
        return True
    return False


def _simple(shown: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line, those in ``$(...)`` too, without their environment."""
    yield from (shlex.split(inner) for inner in re.findall(r"\$\(([^)]*)\)", shown))
    words: list[str] = []
    for word in [*shlex.split(shown, comments=True), "&&"]:
        if word in ("&&", "|"):
            yield words
            words = []
        elif words or not re.match(r"[A-Z_]+=", word):
            words.append(word)
