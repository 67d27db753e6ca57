"""The first thing that an engine's author reads must run, and be short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_processes.py"


@pytest.mark.timeout(60)
def test_two_processes() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=50, check=False
    )
    # A machine that is so busy that a loop stood still may say so.
    said = [line for line in ran.stderr.splitlines() if "stalled" not in line]
    assert (ran.returncode, said) == (0, [])
    assert ran.stdout.splitlines() == [
        "Done(metadata=b'the first token')",
        "K of each token: " + " ".join(map(str, range(40))),
    ]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
