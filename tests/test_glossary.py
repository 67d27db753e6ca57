"""docs/glossary.md: at most 45 terms, each with the symbol that carries it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src" / "kvferry"
MAX_TERMS = 45
ROWS = re.findall(
    r"(?m)^\| (?!term )([^|`-][^|]*) \| `([\w.]+)` \| .+ \|$",
    (ROOT / "docs" / "glossary.md").read_text("utf-8"),
)


def defined(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """Yield classes, functions, fields and module-level names, members as ``Class.member``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from defined(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield owner + node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield from (owner + node.target.id, node.target.id)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


SYMBOLS = {
    name
    for path in CODE.rglob("*.py")
    for name in defined(ast.parse(path.read_text(encoding="utf-8")))
}


def test_the_glossary_is_short_and_names_each_term_once() -> None:
    terms = [term for term, _ in ROWS]
    assert 30 < len(terms) <= MAX_TERMS
    assert len({*terms}) == len(terms)
    lines = (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()
    tables = [line for line in lines if line.startswith("| ") and not line.startswith("| term ")]
    assert len(tables) == len(ROWS), "a row has no symbol"


@pytest.mark.parametrize(("term", "symbol"), ROWS)
def test_each_term_names_a_symbol_of_the_code(term: str, symbol: str) -> None:
    assert symbol in SYMBOLS


def test_a_symbol_that_is_gone_would_be_noticed() -> None:
    assert "NoSuchSymbol" not in SYMBOLS
