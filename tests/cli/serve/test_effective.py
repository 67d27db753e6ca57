"""Completion in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.cli.completion import SHELLS, script
from kvferry.cli.main import build_parser


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("kvferry", *words))
    code = (
        f"{script('bash', build_parser())}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
        '_kvferry; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_parts_and_flags() -> None:
    assert completed("tr") == ["trace"]
    assert set(completed("serve", "")) >= {"prefill", "decode", "router", "discovery", "--port"}
    assert completed("serve", "router", "--poli") == ["--policy"]
    assert "--policy" not in completed("serve", "discovery", "--")
    assert completed("trace", "17", "--sl") == ["--slow"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_is_whole(shell: str) -> None:
    text = script(shell, build_parser())
    assert "trace" in text
    binary = shutil.which(shell)
    if binary is not None:
        subprocess.run([binary, "-n"], input=text, text=True, check=True)
