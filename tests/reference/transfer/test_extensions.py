"""Commands and notes arrive as they were sent."""

from __future__ import annotations

import pytest

from kvferry import Failure, FailureCode
from kvferry.reference.transfer.extensions import (
    AbortCommand,
    Command,
    EndedNote,
    Note,
    OfferedNote,
    OpenCommand,
    ReleasedNote,
    decode_command,
    decode_note,
    encode,
)

GONE = Failure(FailureCode.PEER_GONE, "prefill/1 is gone")


OPEN = OpenCommand(
    request="r",
    room=7,
    deadline_s=1.5,
    digest=b"digest",
    trace=("asked as", "trace"),
    prefill="prefill",
    tokens=40,
    prefix=8,
    pages=[3, 0, 1],
)


@pytest.mark.parametrize("command", [OPEN, AbortCommand("r")])
def test_a_command_arrives_as_it_was_said(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "note",
    [
        OfferedNote("r"),
        EndedNote("r", GONE),
        EndedNote("r", metadata=b"x"),
        ReleasedNote("r", {"runs": 8}),
    ],
)
def test_a_note_arrives_as_it_was_said(note: Note) -> None:
    assert decode_note(encode(note)) == note
