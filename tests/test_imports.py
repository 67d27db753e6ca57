"""The rows of the architecture, and what importing kvferry must not cost."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

import kvferry
from kvferry.protocol.machine import Machine
from kvferry.testing.sim import run_seed

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src" / "kvferry", tmp_path / "kvferry")
    return tmp_path


def test_a_row_imports_only_the_rows_below_it(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line", "rule"),
    [
        ("layout/layout.py", "import kvferry.plan.plan", "A package imports only"),
        ("plan/plan.py", "import kvferry.memory.copy.reference", "A package imports only"),
        ("discovery/records.py", "import kvferry.endpoint.config", "A package imports only"),
        ("plan/pictures/page.py", "import pathlib", "The lower band is pure"),
        ("plan/bind.py", "import threading", "The lower band is pure"),
        ("layout/spec.py", "import os", "The lower band is pure"),
        ("plan/choose.py", "import time", "The lower band is pure"),
        ("cli/load/client.py", "import kvferry.plan", "The load generator works"),
        (
            "cli/load/sweep.py",
            "import kvferry.reference.cluster",
            "The load generator works",
        ),
    ],
)
def test_the_rule_would_notice(copy: Path, module: str, line: str, rule: str) -> None:
    with (copy / "kvferry" / module).open("a") as stream:
        stream.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    broken = [row for row in result.stdout.splitlines() if row.endswith("BROKEN")]
    assert any(row.startswith(rule) for row in broken), result.stdout


def test_importing_kvferry_takes_no_heavy_package() -> None:
    code = (
        "import sys, kvferry.plan, kvferry.layout.hf, kvferry.cli.main; "
        "print(sorted({'torch', 'nixl', 'mooncake', 'vllm', 'hypothesis'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_importing_kvferry_alone_takes_nothing_else_of_ours() -> None:
    code = "import sys, kvferry; print([m for m in sys.modules if m.startswith('kvferry.')])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None, name
    assert set(kvferry.__all__) <= set(dir(kvferry))
    with pytest.raises(AttributeError, match="kvferry has no 'Ferry'"):
        _ = kvferry.Ferry  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(kvferry.__file__).read_text())
    seen = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kvferry.")
        for alias in node.names
    ]
    assert sorted(name for _, name in seen) == sorted(kvferry.__all__)
    for module, name in seen:
        assert getattr(kvferry, name) is getattr(importlib.import_module(str(module)), name)


# ---------------------------------------------------------------- pure machines

PURE = ("protocol", "plan", "layout")
BELOW = ("config", "digest", "errors", "fingerprint", "ids", "prefix", "regions")


def takes_callables(text: str) -> list[str]:
    """Public functions and fields whose annotation names a callable."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (
            not node.name.startswith("_") or node.name == "__init__"
        ):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += [f"{node.name}({arg.arg})" for arg in given if _is_callable(arg.annotation)]
        elif isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            found += [ast.unparse(one) for one in fields if _is_callable(one.annotation)]
    return found


def _is_callable(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Callable" in ast.unparse(annotation)


@pytest.mark.parametrize("package", PURE)
def test_nothing_pure_takes_a_callable(package: str) -> None:
    """A callable that was passed in could reach whatever made it."""
    for path in (ROOT / "src" / "kvferry" / package).rglob("*.py"):
        assert not takes_callables(path.read_text(encoding="utf-8")), path
    assert takes_callables("def cut(stages: Callable[[int], bool]): ...") == ["cut(stages)"]
    assert takes_callables("class Room:\n    on_end: Callable[[], None]")


def test_a_machine_calls_nothing_above_it() -> None:
    """Every call inside ``handle``, in a few simulated worlds, stays in the pure packages."""
    names = {str(ROOT / "src" / "kvferry" / name) for name in (*PURE, *BELOW)}
    inside: list[FrameType] = []
    outside: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code is Machine.handle.__code__:
            inside.append(frame)
        elif event == "return" and inside and frame is inside[-1]:
            inside.pop()
        elif event == "call" and inside and code.co_filename.startswith(str(ROOT / "src")):
            pure = any(code.co_filename.startswith(name) for name in names)
            outside.update([] if pure else [f"{code.co_filename}:{code.co_name}"])

    sys.setprofile(watch)
    try:
        steps = sum(run_seed(seed).steps for seed in range(3))
    finally:
        sys.setprofile(None)
    assert steps > 100
    assert not outside
