"""docs/limits.md: each claim of what was tried links to a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
TRIED = PAGE.read_text(encoding="utf-8").split("### Beside K and V")[1].split("## Not there")[0]
KINDS = ("run", "bytes", "plan", "refused")
# Where engines compute.
GPU_CASES = "scripts/gpu_engines"
ENGINES = ("tests_vllm", "tests_sglang", "tests/reference", GPU_CASES)


class Claim(NamedTuple):
    """A claim, and the test behind it."""

    kind: str
    path: str
    test: str


CLAIMS = [
    Claim(*found)
    for found in dict.fromkeys(re.findall(r'\[(\w+)\]\(\.\./([^ )]+) "(\w+)"\)', TRIED))
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.path}-{claim.test}")
def test_a_claim_has_a_test(claim: Claim) -> None:
    assert claim.kind in KINDS
    assert claim.test.lower().startswith("test") or claim.path.startswith(GPU_CASES)
    nodes = ast.walk(ast.parse((ROOT / claim.path).read_text(encoding="utf-8")))
    assert claim.test in {getattr(node, "name", "") for node in nodes}
    if claim.kind == "run":
        assert claim.path.startswith(ENGINES)


def test_every_cell_says_how_it_was_tried() -> None:
    rows = re.findall(r"(?m)^\| (.+) \|\n(?!\|-)", TRIED)
    cells = [cell for row in rows for cell in row.split(" | ")[1:]]
    words = re.compile(rf"\[({'|'.join(KINDS)})\]\(|not tested")
    assert len(cells) > 25
    assert [cell for cell in cells if not words.search(cell)] == []
