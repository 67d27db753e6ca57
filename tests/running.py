"""Run the command line: in this process, or in one that can be interrupted."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from kvferry.cli.main import main

SHAPE = "--layers 64 --kv-heads 8 --head-dim 128"


def heed_interrupts() -> None:
    """Have processes that start from now on heed SIGINT.

    A shell starts background jobs with SIGINT ignored, and their children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
