"""The house: names that tell, folders instead of prefixes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "src" / "kvferry"
# More files than this side by side are a list, not a folder.
MOST_FILES = 24
# A class with more methods than this has parts that it should hold.
MOST_METHODS = 25
# Whoever begins like this defines no noun.
NO_NOUNS = (
    *("What ", "How ", "Where ", "Which ", "Who ", "Whether ", "When ", "From ", "To "),
    *("Asks ", "Keeps ", "Puts ", "Sets ", "Writes ", "Reads ", "Makes "),
)
NOUN_FIRST = (
    *("cli", "evals", "http", "integrations", "load", "logs", "observe", "pictures"),
    *("discovery", "serve", "testing"),
)


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (HOUSE / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", NOUN_FIRST)
def test_a_module_says_first_what_it_defines(folder: str) -> None:
    for path in modules(folder):
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said, path
        assert not said.startswith(NO_NOUNS), (path, said)


def test_no_class_name_has_more_than_two_places() -> None:
    places = defaultdict(list)
    for path in modules("."):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(HOUSE)))
    assert {name: where for name, where in places.items() if len(where) > 2} == {}


def classes(*folders: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Every class, also one inside a class or a function."""
    for path in modules(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_no_class_has_too_many_methods() -> None:
    """Every def counts, also a property and a dunder."""
    sizes = {
        f"{path.relative_to(HOUSE)}: {node.name}": sum(
            isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body
        )
        for path, node in classes(".")
    }
    assert {name: size for name, size in sizes.items() if size > MOST_METHODS} == {}


def test_machines_and_endpoints_inherit_two_levels_at_most() -> None:
    """A grandchild of a project class should hold a part instead; errors may form a tree."""
    parents: dict[str, set[str]] = defaultdict(set)
    for path, node in classes("."):
        if path != HOUSE / "errors.py":
            parents[node.name] |= {
                ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases
            }
    found = {
        (node.name, parent, grandparent)
        for _, node in classes("protocol", "runtime")
        for parent in parents[node.name] & parents.keys() - {node.name}
        for grandparent in parents[parent] & parents.keys() - {parent}
    }
    assert found == set()


def test_no_folder_is_a_mere_list() -> None:
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in HOUSE.rglob("*/")}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}


@pytest.mark.parametrize("folder", ["serve", "cli", "load", "evals", "discovery"])
def test_a_prefix_is_a_folder(folder: str) -> None:
    """Two modules side by side with the same first word belong into a folder of that name."""
    for place in {path.parent for path in modules(folder)}:
        words = defaultdict(list)
        for path in place.glob("[a-z]*_*.py"):
            words[path.stem.partition("_")[0]].append(path.name)
        assert {word: names for word, names in words.items() if len(names) > 1} == {}, place


def orphans(text: str) -> list[str]:
    """Comments that stand above nothing. Those below a ruled heading are about what follows."""
    blocks = re.findall(r"(?m)((?:^[ \t]*#.*\n)+)(?=\s*\n)", text)
    return [block for block in blocks if "-----" not in block]


def test_no_comment_has_lost_what_it_was_about() -> None:
    assert {str(path): found for path in modules(".") if (found := orphans(path.read_text()))} == {}
    assert orphans("# So many layers at a time.\n\nH = 1\n") == ["# So many layers at a time.\n"]


def test_every_name_for_an_id_is_used() -> None:
    names = [
        target.id
        for node in ast.parse((HOUSE / "ids.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    uses = [
        name.name
        for path in modules(".")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "kvferry.ids"
        for name in node.names
    ]
    own = [node.id for node in ast.walk(ast.parse((HOUSE / "ids.py").read_text()))
           if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]  # fmt: skip
    assert sorted(set(names) - {*uses, *own}) == []
