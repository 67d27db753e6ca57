"""The documented hooks are those of the installed vLLM, and those that the connector defines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from kvferry.connectors.vllm.compat import HOOKS, TESTED_VERSIONS
from tests_vllm.servers import ROOT

ROW = re.compile(r"\| `(\w+)` \| ([\d.]*) ?\| (implemented|left alone)[^|]*\| \S.* \|")


class Hook(NamedTuple):
    """A row of the table."""

    name: str
    since: str
    is_implemented: bool


def documented() -> list[Hook]:
    page = (ROOT / "docs/connectors/vllm-hooks.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    found = [ROW.fullmatch(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if match is None]
    return [Hook(m[1], m[2], m[3] == "implemented") for m in found if m is not None]


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """Ask in a process of its own, since importing vLLM warns."""
    command = [sys.executable, "-m", "tests_vllm.installed_hooks"]
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    made = subprocess.run(
        *(command,), env=dict(os.environ) | variables, capture_output=True, text=True, check=True
    )
    return dict(json.loads(made.stdout.splitlines()[-1]))


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_every_hook_of_this_vllm_is_documented_once(installed: dict[str, Any]) -> None:
    here = release(installed["version"])
    names = [hook.name for hook in documented() if not hook.since or release(hook.since) <= here]
    assert sorted(names) == sorted(installed["hooks"])


def test_the_table_says_which_hooks_are_implemented(installed: dict[str, Any]) -> None:
    here = release(installed["version"])
    names = [
        hook.name
        for hook in documented()
        if hook.is_implemented and (not hook.since or release(hook.since) <= here)
    ]
    assert sorted(names) == sorted(installed["own"])


def test_required_hooks_are_implemented_hooks_of_every_version() -> None:
    everywhere = {hook.name for hook in documented() if hook.is_implemented and not hook.since}
    assert set(HOOKS) <= everywhere
    assert {hook.since for hook in documented() if hook.since} < set(TESTED_VERSIONS)
