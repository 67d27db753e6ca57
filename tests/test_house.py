"""Rules of the code base that no linter checks: unique names, mirrored tests, small classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ROOT / "src" / "kvferry"
# A folder with more modules than this reads as a list.
MAX_MODULES = 24
# A class with more methods than this should hold parts.
MAX_METHODS = 25
MAX_LINES = 500


def modules() -> list[Path]:
    return sorted(CODE.rglob("*.py"))


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield every class, also one inside a class or a function."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(str(path.relative_to(CODE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_class_has_too_many_methods() -> None:
    """Count every def, also properties and dunders."""
    sizes = {
        f"{path.relative_to(CODE)}: {node.name}": sum(
            isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body
        )
        for path, node in classes()
    }
    assert {name: size for name, size in sizes.items() if size > MAX_METHODS} == {}


def test_machines_and_endpoints_inherit_two_levels_at_most() -> None:
    """A grandchild of a project class should hold a part instead; errors may form a tree."""
    parents: dict[str, set[str]] = defaultdict(set)
    for path, node in classes():
        if path != CODE / "errors.py":
            parents[node.name] |= {
                ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases
            }
    found = {
        (node.name, parent, grandparent)
        for path, node in classes()
        if path.relative_to(CODE).parts[0] in ("protocol", "endpoint")
        for parent in parents[node.name] & parents.keys() - {node.name}
        for grandparent in parents[parent] & parents.keys() - {parent}
    }
    assert found == set()


def test_no_folder_has_too_many_modules() -> None:
    sizes = {str(folder): len(list(folder.glob("*.py"))) for folder in CODE.rglob("*/")}
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def test_no_module_is_too_long() -> None:
    every = [*modules(), *(ROOT / "tests").rglob("*.py")]
    sizes = {str(path): path.read_text(encoding="utf-8").count("\n") for path in every}
    assert {path: size for path, size in sizes.items() if size > MAX_LINES} == {}


def orphans(text: str) -> list[str]:
    """Return comments that stand above a blank line. Ruled headings may."""
    blocks = re.findall(r"(?m)((?:^[ \t]*#.*\n)+)(?=\s*\n)", text)
    return [block for block in blocks if "-----" not in block]


def test_comments_stand_above_code() -> None:
    assert {str(path): found for path in modules() if (found := orphans(path.read_text()))} == {}
    assert orphans("# Layers per push.\n\nH = 1\n") == ["# Layers per push.\n"]


def test_every_id_type_is_used() -> None:
    tree = ast.parse((CODE / "ids.py").read_text(encoding="utf-8"))
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used = {
        name.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "kvferry.ids"
        for name in node.names
    }
    used |= {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert names - used == set()


def test_tests_mirror_modules() -> None:
    """The test of a/b.py is tests/a/test_b.py; a scenario's file name says it in several words."""
    tests = ROOT / "tests"
    misplaced = []
    for path in sorted(tests.rglob("test_*.py")):
        place, name = path.relative_to(tests).parent, path.stem.removeprefix("test_")
        mirrored = (CODE / place / f"{name}.py").exists() or (CODE / place / name).is_dir()
        if place != Path() and not mirrored and "_" not in name:
            misplaced.append(str(path.relative_to(tests)))
    assert misplaced == []
