"""docs/glossary.md explains words that the code has, and names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src" / "kvferry"
# Commands, servers and figures have words of their own, such as plot.
ELSEWHERE = ("cli", "pictures", "reference", "router")
TEXT = "\n".join(
    path.read_text(encoding="utf-8")
    for path in CODE.rglob("*.py")
    if path.relative_to(CODE).parts[0] not in ELSEWHERE
)
ROWS = [
    (row[1], row[2])
    for row in re.finditer(
        r"(?m)^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text("utf-8")
    )
    if row[1] != "word" and not row[1].startswith("-")
]
WORDS = [word for row, _ in ROWS for word in row.split(", ")]


def is_in_code(word: str) -> bool:
    """Also as a part of an identifier, or in the plural."""
    spaced = "[ _-]?".join(map(re.escape, word.split()))
    return re.search(rf"(?i)(?<![a-z]){spaced}(?:s|ed)?(?![a-z])", TEXT) is not None


def test_there_are_words() -> None:
    assert len(WORDS) > 80
    assert len({*WORDS}) == len(WORDS)
    assert not is_in_code("plot")


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_in_the_code(word: str) -> None:
    assert is_in_code(word)


def test_what_an_entry_names_is_there() -> None:
    named = [name for _, meaning in ROWS for name in re.findall(r"`([\w./]+)`", meaning)]
    missing = [
        name
        for name in named
        if not (CODE / name).exists() and not re.search(rf"\b{name.split('.')[-1]}\b", TEXT)
    ]
    assert missing == []
