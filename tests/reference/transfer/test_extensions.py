"""Commands and notes arrive as they were sent."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry import Failure, FailureCode
from kvferry.reference.transfer.extensions import (
    AbortCommand,
    Command,
    EndedNote,
    LendCommand,
    Note,
    OfferedNote,
    OpenCommand,
    PullCommand,
    ReceiveCommand,
    ReleasedNote,
    decode_command,
    decode_note,
    encode,
)

GONE = Failure(FailureCode.PEER_GONE, "prefill/1 is gone")


ROOM: dict[str, Any] = {
    "request": "r",
    "room": 7,
    "deadline_s": 1.5,
    "trace": ("asked as", "trace"),
}
OPEN = OpenCommand(**ROOM, digest=b"digest")
LEND = LendCommand(**ROOM, digest=b"digest", tokens=32, pages=[3, 0])
RECEIVE = ReceiveCommand(
    **ROOM, digest=b"digest", prefill="prefill", tokens=40, prefix=8, pages=[3, 0, 1]
)
PULL = PullCommand(**ROOM, holder="decode", tokens=[5] * 32, prefix=16, pages=[3, 0])


@pytest.mark.parametrize("command", [OPEN, LEND, RECEIVE, PULL, AbortCommand("r")])
def test_a_command_arrives_as_it_was_said(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "note",
    [
        OfferedNote("r"),
        EndedNote("r", GONE),
        EndedNote("r", metadata=b"x", pulled=16),
        ReleasedNote("r", {"runs": 8}),
    ],
)
def test_a_note_arrives_as_it_was_said(note: Note) -> None:
    assert decode_note(encode(note)) == note
