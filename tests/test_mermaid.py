"""The Mermaid sequence diagrams of the documentation parse.

This checks the part of the grammar that the pages use; ``scripts/check-mermaid`` parses every
diagram with Mermaid itself.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTICIPANT = re.compile(r"(?:participant|actor) (\w+)(?: as (.+))?")
MESSAGE = re.compile(r"(\w+)(?:->>|-->>|-x|--x|->|-->)(\w+): (.+)")
NOTE = re.compile(r"Note (?:over|left of|right of) (\w+(?:,\w+)?): (.+)")
OPEN = re.compile(r"(alt|opt|loop|par|critical|rect)\b.*")
# The word that continues a block, by the block's word.
CONTINUE = {"else": "alt", "and": "par", "option": "critical"}


class BadDiagram(Exception):
    """A line of a sequence diagram that Mermaid would refuse."""


class Sequence:
    """The participants and the open blocks of a diagram, line by line."""

    def __init__(self) -> None:
        self.participants: set[str] = set()
        self.blocks: list[str] = []

    def read(self, line: str) -> None:
        """Read one line. Raises ``BadDiagram``."""
        word = line.split(" ", maxsplit=1)[0]
        if ";" in line or "#" in line:
            raise BadDiagram(f"needs an escape: {line}")
        if found := PARTICIPANT.fullmatch(line):
            if found[1] in self.participants:
                raise BadDiagram(f"declared twice: {line}")
            self.participants.add(found[1])
        elif found := MESSAGE.fullmatch(line) or NOTE.fullmatch(line):
            names = ",".join(found.groups()[:-1]).split(",")
            if not self.participants.issuperset(names):
                raise BadDiagram(f"undeclared participant: {line}")
        else:
            self._block(word, line)

    def _block(self, word: str, line: str) -> None:
        if OPEN.fullmatch(line):
            self.blocks.append(word)
        elif word in CONTINUE:
            if self.blocks[-1:] != [CONTINUE[word]]:
                raise BadDiagram(f"outside of its block: {line}")
        elif line == "end" and self.blocks:
            self.blocks.pop()
        else:
            raise BadDiagram(line)


def parse_sequence(text: str) -> set[str]:
    """Return the participants of a sequence diagram. Raises ``BadDiagram``."""
    head, *lines = [line.strip() for line in text.strip().splitlines()]
    if head != "sequenceDiagram":
        raise BadDiagram(head)
    sequence = Sequence()
    for line in lines:
        sequence.read(line)
    if sequence.blocks:
        raise BadDiagram(f"without an end: {sequence.blocks}")
    return sequence.participants


DIAGRAMS = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in sorted(ROOT.glob("**/*.md"))
    if not {"node_modules", ".venv"} & {*path.parts}
    for number, block in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")), 1)
    if block.startswith("sequenceDiagram")
]


@pytest.mark.parametrize("diagram", DIAGRAMS)
def test_a_sequence_diagram_parses(diagram: str) -> None:
    assert len(parse_sequence(diagram)) >= 2


def test_the_operations_page_has_a_diagram_for_each_case() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    without = [one.splitlines()[0] for one in sections if not BLOCK.search(one)]
    assert without == ["Timeouts", "Size", "What to alert on"]


@pytest.mark.parametrize(
    "line",
    [
        "A->>>B: two many heads",
        "A->>B",
        "A->>C: to a stranger",
        "nonsense",
        "end",
        "else otherwise",
        "alt never ended",
        "participant A",
        "A->>B: one; two",
    ],
)
def test_a_wrong_line_is_found(line: str) -> None:
    head = "sequenceDiagram\n  participant A\n  participant B as another\n  A->>B: hello\n"
    parse_sequence(head)
    with pytest.raises(BadDiagram):
        parse_sequence(f"{head}  {line}\n")
