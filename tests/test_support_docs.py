"""docs/support.md is what the planner and docs/support.toml say, and each claim has its test."""

from __future__ import annotations

import ast

import pytest
from support_matrix import (
    COLUMNS,
    FAMILIES,
    LAYOUTS,
    PAGE,
    ROOT,
    Cell,
    Pair,
    layout,
    named_tests,
    page,
    planned,
    read_facts,
)

from kvferry.layout import Parallel

FACTS = read_facts()
CLAIMS = [claim for section in FACTS.sections for claim in section.claims]
# Real engines run only in these tests.
ENGINES = ("tests_vllm", "tests_sglang", "tests/reference", "scripts/gpu_engines")


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(FACTS), "run python tests/support_matrix.py"


@pytest.mark.parametrize("test", named_tests(FACTS))
def test_each_named_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_claims_name_what_the_matrix_has() -> None:
    for claim in CLAIMS:
        assert set(claim.families) <= set(FAMILIES)
        assert set(claim.layouts) <= set(COLUMNS)
        assert claim.test or (claim.cell is Cell.REFUSED and claim.reason), claim
        if claim.cell is Cell.REAL:
            assert claim.test.startswith(ENGINES), claim


def test_the_planner_decides_what_nobody_claims() -> None:
    spec = FAMILIES["attention"]()
    assert planned(spec, LAYOUTS["different TP"]) == "planned"
    uneven = Pair(layout(Parallel(tp=3)), layout())
    assert planned(spec, uneven).startswith("refused: tp=3 neither divides")
