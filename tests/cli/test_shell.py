"""What is running, and the tab key: the effective configuration, and completion in real shells."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kvferry.cli.serve.effective import settings

from kvferry.cli.completion import SHELLS, script
from kvferry.cli.main import build_parser, main

ROOT = Path(__file__).parents[2]


def config(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*words, "--print-config", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["config"]


def test_a_flag_a_file_and_a_default_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    router = config(["serve", "router", "--discovery", "http://10.0.0.1:7077"], capsys)
    assert router["discovery"] == {"value": "http://10.0.0.1:7077", "from": "--discovery"}
    assert router["port"] == {"value": 8000, "from": "default"}
    file = tmp_path / "cluster.toml"
    file.write_text(
        'model = "tiny"\n[router]\nport = 9000\n[[decode]]\ntp = 1\n[[prefill]]\ntp = 2\n'
    )
    whole = config(["serve", "router", "--config", str(file)], capsys)
    assert whole["router.port"] == {"value": 9000, "from": str(file)}
    assert whole["prefill.0.tp"] == {"value": 2, "from": str(file)}
    assert whole["prefill.0.page"] == {"value": 16, "from": "default"}


def test_one_flag_may_set_several_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--tiny", "--prefill", "tp=2,page=32", "--port", "9001"]
    whole = config(words, capsys)
    told = {key: one["from"] for key, one in whole.items() if one["from"] != "default"}
    assert told == {
        "model": "--tiny",
        "prefill.0.tp": "--prefill",
        "prefill.0.page": "--prefill",
        "router.port": "--port",
    }


def test_the_environment_is_named() -> None:
    args = argparse.Namespace(config=None)
    found = settings(args, lambda _: {"key": None}, {"KVFERRY_KEY_FILE": "/k"})
    assert found == [("key", "/k", "KVFERRY_KEY_FILE")]


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
