"""docs/embedding.md is a program that runs, and tells of everything that an engine may call."""

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

GUIDE = Path(__file__).parents[1] / "docs" / "embedding.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def program(text: str) -> str:
    """The code blocks one after another, each on the line that it has in the page."""
    lines = []
    inside = False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


@pytest.mark.timeout(60)
def test_the_guide_runs() -> None:
    namespace: dict[str, Any] = {}
    try:
        exec(compile(program(TEXT), str(GUIDE), "exec"), namespace)
    finally:
        # Whatever a block has begun ends here too if a later one fails.
        for endpoint in (namespace.get("target"), *namespace.get("sources", ())):
            if endpoint is not None:
                endpoint.close()
        if "discovery" in namespace:
            namespace["discovery"].stop()
    assert namespace["outcome"].metadata == b"the first token"


def test_the_page_on_plans_runs() -> None:
    page = GUIDE.with_name("planning.md")
    namespace: dict[str, Any] = {}
    exec(compile(program(page.read_text(encoding="utf-8")), str(page), "exec"), namespace)
    assert namespace["plan"].payload_bytes(namespace["Request"](8192)) == 2147483648


def test_a_block_that_fails_names_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile(program("# Title\n\n```python\n1 / 0\n```\n"), "page.md", "exec"), {})
    assert caught.traceback[-1].lineno == 3


def public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


# Between the owner's thread and the handle; no engine calls these.
INNER = {"set_missing", "end", "release"}


def test_every_call_of_an_engine_is_told() -> None:
    calls = set().union(*map(public, (Handle, Outgoing, Incoming))) - INNER
    calls |= {"open", "receive", "statuses", "declare_dead", "close", "stats", "staging_bytes"}
    assert {name for name in calls if not re.search(rf"\b{name}\b", TEXT)} == set()


@pytest.mark.parametrize("call", [TargetEndpoint.receive, Outgoing.close, SourceEndpoint.__init__])
def test_every_argument_is_told(call: Any) -> None:
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    assert [name for name in names if not re.search(rf"`?\b{name}\b", TEXT)] == []


def test_every_failure_has_a_remedy() -> None:
    told = set(re.findall(r"`([a-z-]+)`", TEXT.split("### After a failure")[1]))
    assert {str(code) for code in FailureCode} - told == set()


def test_every_setting_is_told() -> None:
    settings = TEXT.split("## Config, security, metrics")[1]
    assert {
        name for name in EndpointConfig.__struct_fields__ if f"`{name}`" not in settings
    } == set()


def test_the_guide_needs_only_what_is_public() -> None:
    modules = re.findall(r"^(?:from|import) (kvferry[\w.]*)", program(TEXT), re.MULTILINE)
    assert set(modules) == {"kvferry"}
