"""State diagrams for ``docs/protocol.md``, generated from the transition tables.

``python tests/protocol/diagram.py`` prints the section between the page's markers. Creation and
deletion are not in the tables and are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kvferry.protocol.states import (
    INBOUND,
    LINK,
    OUTBOUND,
    SOURCE_ROOM,
    InboundState,
    LinkState,
    OutboundState,
    RoomState,
)

BEGIN = "<!-- generated: states -->"
END = "<!-- end -->"

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


class Edge(NamedTuple):
    """One transition of a diagram."""

    origin: str
    into: str
    text: str


def diagrams() -> str:
    """Return the whole section: one diagram per table, without steps that change nothing."""
    link = _begins(LinkState.GREETING, "target sends Hello")
    link += _begins(LinkState.GREETING, "source sends Welcome")
    link += _inside(LINK)
    link += _ends(LinkState.LOST, "nothing waits for proof") + _ends(LinkState.GONE, "forgotten")
    inbound = _begins(InboundState.CONNECTING, "engine wants the room")
    inbound += _inside(INBOUND)
    inbound += _ends(InboundState.CLOSED, "room is complete") + _ends(
        InboundState.QUIET, "every inbound transfer is quiet"
    )
    room = _begins(RoomState.EARLY, "Offer received") + _begins(RoomState.WARNED, "Abort received")
    room += _begins(RoomState.OPEN, "engine opens it")
    room += _inside(SOURCE_ROOM)
    for brief in (RoomState.EARLY, RoomState.WARNED, RoomState.OVER):
        room += _ends(brief, "expired")
    room += _ends(RoomState.FINISHED, "Complete from every target")
    room += _ends(RoomState.FAILING, "last write ended, every target has sent something")
    outbound = _begins(OutboundState.SENDING, "Offer accepted")
    outbound += _inside(OUTBOUND)
    outbound += _ends(OutboundState.CLOSED, "Complete received")
    outbound += _ends(OutboundState.DRAINING, "last write has ended, Drained sent")
    parts = [
        "Transitions from a state to itself are left out.",
        _draw("Link, on either side", link),
        _draw("Inbound transfer: what a target expects from one source in one room", inbound),
        _draw("Room of a source", room),
        _draw("Outbound transfer: what a source owes one target in one room", outbound),
    ]
    return "\n\n".join(parts) + "\n"


def _inside(table: Mapping[tuple[S, T], S]) -> list[Edge]:
    return [
        Edge(str(state), str(after), str(step))
        for (state, step), after in table.items()
        if state is not after
    ]


def _begins(state: StrEnum, text: str) -> list[Edge]:
    return [Edge("[*]", str(state), text)]


def _ends(state: StrEnum, text: str) -> list[Edge]:
    return [Edge(str(state), "[*]", text)]


def _draw(title: str, edges: list[Edge]) -> str:
    rows = [f"    {edge.origin} --> {edge.into}: {edge.text}" for edge in edges]
    return "\n".join([f"### {title}", "", "```mermaid", "stateDiagram-v2", *rows, "```"])


if __name__ == "__main__":
    print(diagrams(), end="")
