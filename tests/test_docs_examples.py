"""The examples of README, docs and ``--help``: code blocks run, and commands parse.

``test_docs_blocks`` parses the commands of the pages.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest
from discovery.parts import layout, record
from rich.console import Console

import kvferry
from kvferry.cli.main import build_parser, main
from kvferry.cli.trace.command import render
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.outgoing import Outgoing
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.waterfall import Waterfall
from kvferry.testing.sim.breaks import BREAKS
from kvferry.testing.sim.scenarios import SCENARIOS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def shown_commands() -> list[str]:
    """Return the commands of the examples in ``--help``."""
    found = []
    for parser in parsers(build_parser()):
        lines = (parser.epilog or "").replace("\\\n", "").splitlines()
        # A comment stands behind two spaces or more.
        found += [
            re.split(r" {2,}", line.strip())[0] for line in lines if line.startswith("  kvferry ")
        ]
    return sorted(set(found))


@pytest.mark.parametrize("command", shown_commands())
def test_a_shown_command_parses(command: str) -> None:
    # Only what is before a pipe or a comment.
    words = shlex.split(command.partition(" | ")[0], comments=True)
    args = build_parser().parse_args(words[1:])
    assert callable(args.run)


def test_there_are_commands_in_the_help() -> None:
    commands = {command.split()[1] for command in shown_commands()}
    assert {"plan", "demo", "bench", "doctor", "eval", "key", "serve", "sim", "top"} <= commands


def named_flags() -> list[tuple[str, str]]:
    """Return the flags of commands named in running text, each with the page."""
    found = set()
    for page in PAGES:
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
        for command in re.findall(r"`kvferry ([^`]+)`", text):
            found |= {(page.name, flag) for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", command)}
    return sorted(found)


@pytest.mark.parametrize(("page", "flag"), named_flags())
def test_a_named_flag_exists(page: str, flag: str) -> None:
    known = {name for parser in parsers(build_parser()) for name in parser._option_string_actions}
    assert flag in known


def test_readmes_plan_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"(?ms)^\$ kvferry (plan .*?)\n```", README)
    monkeypatch.chdir(tmp_path)
    assert main(command.replace("\\\n", "").split()) == 0
    assert "every unit arrives exactly once" in capsys.readouterr().out
    assert (tmp_path / "plan.html").read_text().startswith("<!DOCTYPE html>")


def test_readmes_broken_rule_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    (rule,) = re.findall(r"kvferry sim --break ([a-z-]+)", README)
    assert main(["sim", "--break", rule]) == 0
    assert "caught" in capsys.readouterr().out


def test_the_pages_count_rules_and_scenarios() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "ARCHITECTURE.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        rules = re.findall(r"(\d+) (?:deliberately )?broken rules", text)
        assert set(rules) == {str(len(BREAKS))}, page.name
        assert set(re.findall(r"(\d+) named scenarios", text)) <= {str(len(SCENARIOS))}


def test_readmes_calls_have_the_endpoints_signatures() -> None:
    """Its block is an outline, so the endpoints are stand-ins that check every call."""
    source, target = (
        create_autospec(kind) for kind in (kvferry.SourceEndpoint, kvferry.TargetEndpoint)
    )
    source.return_value.open.return_value = create_autospec(Outgoing, instance=True)
    (code,) = blocks(README, "python")
    first, _, rest = code.partition("\n")
    assert first == "from kvferry import SourceEndpoint, TargetEndpoint, digest_of"
    calls, _, wait = rest.rpartition("\nawait into")
    names = ("layout", "pools", "rank", "model", "url", "room", "first_token", "n", "m")
    namespace: dict[str, Any] = dict.fromkeys((*names, "free_pages"))
    namespace |= {
        "SourceEndpoint": source,
        "TargetEndpoint": target,
        "digest_of": kvferry.digest_of,
        "tokens": [1, 2],
        "model": "m",
    }
    exec(calls, namespace)
    assert target.return_value.receive.call_args.kwargs["digest"] == namespace["mine"]
    for name in ("__await__", *re.findall(r"into\.(\w+)", wait)):
        assert hasattr(Handle("room"), name)


def test_the_discovery_pages_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine's loopback instead of the page's addresses."""
    (code,) = blocks((ROOT / "docs" / "discovery.md").read_text(encoding="utf-8"), "python")
    monkeypatch.chdir(tmp_path)
    ClusterKey.new().write(Path("cluster.key"))
    here = code.replace('"0.0.0.0", 7077', '"127.0.0.1", 0').replace(
        '"http://10.0.0.1:7077"', "server.url"
    )
    assert here.count("server.url") == 1
    views: list[object] = []
    namespace: dict[str, Any] = {
        "record": record("prefill-0", layout=layout(tp=1)),
        "on_view": views.append,
    }
    try:
        exec(here, namespace)
    finally:
        namespace["client"].close()
        namespace["server"].stop()
    assert namespace["names"] == ["prefill-0"]
    assert namespace["view"].name == "prefill-0"


def test_the_observing_page_shows_what_trace_prints() -> None:
    """``tests/data/trace.json`` is the document of the page's room, as ``--json`` printed it."""
    document = (ROOT / "tests" / "data" / "trace.json").read_bytes()
    out = Console(file=StringIO(), width=102)
    out.print(render(msgspec.json.decode(document, type=Waterfall)))
    assert isinstance(out.file, StringIO)
    printed = [line.rstrip() for line in out.file.getvalue().splitlines()]
    page = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    command, *shown = blocks(page, "console")[0].splitlines()
    assert command.startswith("$ kvferry trace ")
    assert shown == printed
