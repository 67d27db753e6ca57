"""docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "security.md").read_text()


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 30
    source = "".join(path.read_text() for path in TESTS.rglob("*.py"))
    existing = set(re.findall(r"def (test_\w+)\(", source))
    assert named - existing == set()
