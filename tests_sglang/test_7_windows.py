"""Sliding windows between SGLang's own pools and allocators.

The tests start no servers, because SGLang on a CPU computes such layers wrongly or in another pool.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_6_failures import all_done, run

# Shorter than the window, as long, and longer; some fill their last page.
LENGTHS = ("5", "7", "8", "22", "24")


@pytest.mark.parametrize("prefill", ["ranks", "stages"])
def test_window_layers_get_their_last_tokens_and_other_layers_all(
    folder: Path, prefill: str
) -> None:
    results = run(folder, "windows.py", prefill, *LENGTHS)
    assert [str(result["tokens"]) for result in results] == [*LENGTHS]
    assert all_done(results)
    assert [result["touched"] for result in results] == [0] * len(LENGTHS)
