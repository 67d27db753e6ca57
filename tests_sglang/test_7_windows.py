"""Sliding windows between SGLang's own pools and allocators.

Without servers: on a CPU, SGLang 0.5.23 computes such layers wrongly, or not in that pool.
"""

from __future__ import annotations

from pathlib import Path

from test_6_failures import are_done, run

# Shorter than the window, as long and one longer, on and off the edges of pages.
LENGTHS = ("5", "7", "8", "22", "24")


def test_windows_carry_their_last_tokens_and_other_layers_all(folder: Path) -> None:
    said = run(folder, "windows.py", *LENGTHS)
    assert [str(each["tokens"]) for each in said] == [*LENGTHS]
    assert are_done(said)
    assert [each["strange"] for each in said] == [0] * len(LENGTHS)
