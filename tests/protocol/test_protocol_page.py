"""docs/protocol.md is complete, and its diagrams are up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec.inspect import StructType, type_info
from protocol.diagram import BEGIN, END, diagrams

from kvferry.config import ProtocolConfig
from kvferry.protocol.codec import FrameFault
from kvferry.protocol.messages import Body, RefusalCode
from kvferry.protocol.outcome import FailureCode
from kvferry.protocol.states import INBOUND, LINK, OUTBOUND, SOURCE_ROOM

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_state_diagrams_are_current() -> None:
    start, end = PAGE.index(BEGIN) + len(BEGIN), PAGE.index(END)
    assert PAGE[start:end].strip() == diagrams().strip(), (
        "docs/protocol.md is stale: put the output of `python tests/protocol/diagram.py` "
        f"between {BEGIN} and {END}"
    )


def test_every_transition_is_drawn() -> None:
    drawn = diagrams()
    changes = [
        f"    {state} --> {after}: {step}"
        for table in (LINK, INBOUND, SOURCE_ROOM, OUTBOUND)
        for (state, step), after in table.items()
        if state is not after
    ]
    assert len(changes) > 20
    assert [row for row in changes if row not in drawn] == []


@pytest.mark.parametrize("message", get_args(Body), ids=lambda message: message.__name__)
def test_every_message_is_documented(message: type) -> None:
    assert re.search(rf"\*\*{message.__name__}\*\*", PAGE)


@pytest.mark.parametrize("message", get_args(Body), ids=lambda message: message.__name__)
def test_every_field_is_in_its_row(message: type[msgspec.Struct]) -> None:
    (row,) = re.findall(rf"^\| \*\*{message.__name__}\*\* \| `(.+?)` \|.*?\| (.*) \|$", PAGE, re.M)
    info = type_info(message)
    assert isinstance(info, StructType)
    tag, fields = row
    assert tag == info.tag
    said = [] if fields == "none" else [re.split(r"\W", part)[0] for part in fields.split("; ")]
    assert said == list(message.__struct_fields__)


@pytest.mark.parametrize("code", [*FailureCode, *RefusalCode, *FrameFault])
def test_every_code_is_documented(code: str) -> None:
    assert f"`{code}`" in PAGE


@pytest.mark.parametrize("name", ProtocolConfig.__struct_fields__)
def test_every_setting_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE
