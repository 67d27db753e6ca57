"""``kvferry serve --print-config``: values and where they come from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.cli.serve.effective import settings


def config(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([*words, "--print-config", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["config"]


def test_sources_of_values_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
