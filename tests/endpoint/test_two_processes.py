"""The example of two processes runs and stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_processes.py"


@pytest.mark.timeout(60)
def test_the_example_runs() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=50, check=False
    )
    # On a busy machine the watchdog may warn of a stall.
    warnings = [line for line in ran.stderr.splitlines() if "stalled" not in line]
    assert (ran.returncode, warnings) == (0, [])
    assert ran.stdout.splitlines() == [
        "Done(metadata=b'the first token')",
        "K of each token: " + " ".join(map(str, range(40))),
    ]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
