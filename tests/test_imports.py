"""The rows of the architecture, and what importing kvferry must not cost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        ("plan/bind.py", "import threading", "The lower half is pure"),
        ("layout/spec.py", "import os", "The lower half is pure"),
        ("plan/choose.py", "import time", "The lower half is pure"),
        ("load/client.py", "import kvferry.plan", "Load and evals ask any endpoint"),
        ("evals/run.py", "import kvferry.serve.cluster", "Load and evals ask any endpoint"),
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
