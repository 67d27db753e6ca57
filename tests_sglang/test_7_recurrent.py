"""Recurrent state from pipeline stages, between SGLang's own pools without a server."""

from __future__ import annotations

from pathlib import Path

from test_6_failures import all_done, run

LENGTHS = ("1", "7", "22", "24")


def test_state_of_all_stages_arrives(folder: Path) -> None:
    results = run(folder, "recurrent.py", *LENGTHS)
    assert [str(result["tokens"]) for result in results] == [*LENGTHS]
    assert all_done(results)
    assert [result["touched"] for result in results] == [0] * len(LENGTHS)
