"""The rows of the architecture, and what importing kvferry must not cost."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry

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
        ("layout/layout.py", "import kvferry.plan.plan", "A row imports only"),
        ("plan/plan.py", "import kvferry.copy.reference", "A row imports only"),
        ("plan/plan.py", "import kvferry.pictures", "A row imports only"),
        ("rendezvous/records.py", "import kvferry.runtime.config", "A row imports only"),
        ("pictures/page.py", "import pathlib", "The lower half is pure"),
        ("plan/bind.py", "import threading", "The lower half is pure"),
        ("layout/spec.py", "import os", "The lower half is pure"),
        ("plan/choose.py", "import time", "The lower half is pure"),
        ("load/client.py", "import kvferry.plan", "Load and evals ask any endpoint"),
        (
            "evals/run.py",
            "import kvferry.serve.cluster",
            "Load and evals ask any endpoint",
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
