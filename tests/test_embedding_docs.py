"""The embedding tutorial runs, and its reference covers everything that an engine may call."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry import EndpointConfig, SourceEndpoint, TargetEndpoint
from kvferry.endpoint.handles import Handle
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.outgoing import Outgoing
from kvferry.protocol.outcome import FailureCode

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL, REFERENCE = DOCS / "embedding.md", DOCS / "embedding-reference.md"
TEXT = REFERENCE.read_text(encoding="utf-8")


def program(text: str) -> str:
    """Return the code blocks one after another, each on the line that it has in the page."""
    lines = []
    inside = False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


def run(page: Path, namespace: dict[str, Any]) -> None:
    exec(compile(program(page.read_text(encoding="utf-8")), str(page), "exec"), namespace)


@pytest.mark.timeout(60)
def test_the_tutorial_runs() -> None:
    namespace: dict[str, Any] = {}
    try:
        run(TUTORIAL, namespace)
    finally:
        # Close what a block has opened if a later one fails.
        for endpoint in (namespace.get("target"), *namespace.get("sources", ())):
            if endpoint is not None:
                endpoint.close()
        if "discovery" in namespace:
            namespace["discovery"].stop()
    assert namespace["outcome"].metadata == b"the first token"


@pytest.mark.timeout(60)
def test_the_reference_runs() -> None:
    namespace: dict[str, Any] = {}
    run(REFERENCE, namespace)
    assert namespace["into"].metadata == b"found"


def test_the_page_on_plans_runs() -> None:
    namespace: dict[str, Any] = {}
    run(DOCS / "planning.md", namespace)
    assert namespace["plan"].payload_bytes(namespace["Request"](8192)) == 2147483648


def test_a_block_that_fails_names_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(program("# Title\n\n```python\n1 / 0\n```\n"), "page.md", "exec"), {})
    assert caught.traceback[-1].lineno == 3


def public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


# Called by the loop thread only.
INNER = {"end", "release", "page_counts"}


def test_every_call_of_an_engine_is_documented() -> None:
    calls = set().union(*map(public, (Handle, Outgoing, Incoming))) - INNER
    calls |= {"open", "receive", "statuses", "declare_dead", "close", "stats", "staging_bytes"}
    assert {name for name in calls if not re.search(rf"\b{name}\b", TEXT)} == set()


@pytest.mark.parametrize("call", [TargetEndpoint.receive, Outgoing.close, SourceEndpoint.__init__])
def test_every_argument_is_documented(call: Any) -> None:
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    assert [name for name in names if not re.search(rf"`?\b{name}\b", TEXT)] == []


def test_every_failure_has_a_remedy() -> None:
    told = set(re.findall(r"`([a-z-]+)`", TEXT.split("### After a failure")[1]))
    assert {str(code) for code in FailureCode} - told == set()


def test_every_setting_is_documented() -> None:
    settings = TEXT.split("## Configuration")[1]
    assert {
        name for name in EndpointConfig.__struct_fields__ if f"`{name}`" not in settings
    } == set()


@pytest.mark.parametrize("page", [TUTORIAL, REFERENCE], ids=lambda page: page.stem)
def test_a_page_imports_only_what_is_public(page: Path) -> None:
    code = program(page.read_text(encoding="utf-8"))
    modules = re.findall(r"^(?:from|import) (kvferry[\w.]*)", code, re.MULTILINE)
    assert set(modules) == {"kvferry"}
