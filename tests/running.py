"""Run the command line in this process and return its output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli.main import main

SHAPE = "--layers 64 --kv-heads 8 --head-dim 128"


def plan(capsys: pytest.CaptureFixture[str], words: str | list[str]) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of ``kvferry plan``."""
    status = main(["plan", *(words.split() if isinstance(words, str) else words)])
    out, err = capsys.readouterr()
    return status, out, err


def document(capsys: pytest.CaptureFixture[str], words: str, status: int = 0) -> dict[str, Any]:
    """Return the JSON document that ``kvferry plan --json`` prints."""
    got, out, _ = plan(capsys, words + " --json")
    assert got == status
    result = json.loads(out.splitlines()[-1])
    assert isinstance(result, dict)
    return result
