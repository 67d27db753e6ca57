"""State diagrams for the documentation, drawn from the tables themselves.

Pure: it returns text. ``python tests/protocol/diagram.py`` prints the section
that ``docs/protocol.md`` has between its markers. Where a life begins and what
deletes it is not in the tables, and is written down here.
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
    """One arrow."""

    origin: str
    into: str
    text: str


def diagrams() -> str:
    """The whole section: one diagram for each table.

    Steps that change nothing (a state to itself) are left out of the drawings.
    """
    link = _begins(LinkState.GREETING, "target says Hello")
    link += _begins(LinkState.GREETING, "source says Welcome")
    link += _inside(LINK)
    link += _ends(LinkState.LOST, "nothing waits for proof") + _ends(LinkState.GONE, "forgotten")
    inbound = _begins(InboundState.CONNECTING, "engine wants the room")
    inbound += _inside(INBOUND)
    inbound += _ends(InboundState.CLOSED, "room is complete") + _ends(
        InboundState.QUIET, "every inbound is quiet"
    )
    room = _begins(RoomState.EARLY, "Offer came") + _begins(RoomState.WARNED, "Abort came")
    room += _begins(RoomState.OPEN, "engine opens it")
    room += _inside(SOURCE_ROOM)
    for brief in (RoomState.EARLY, RoomState.WARNED, RoomState.OVER):
        room += _ends(brief, "expired")
    room += _ends(RoomState.FINISHED, "Complete from every target")
    room += _ends(RoomState.FAILING, "last write ended, every target heard")
    outbound = _begins(OutboundState.SENDING, "Offer taken")
    outbound += _inside(OUTBOUND)
    outbound += _ends(OutboundState.CLOSED, "Complete came")
    outbound += _ends(OutboundState.DRAINING, "last write has ended, Drained sent")
    parts = [
        "Steps that change nothing are left out.",
        _draw("A link, at either side", link),
        _draw("A inbound: what a target expects from one source in one room", inbound),
        _draw("A room at a source", room),
        _draw("A outbound: what a source owes one target in one room", outbound),
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
