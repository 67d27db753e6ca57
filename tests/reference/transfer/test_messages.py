"""What ranks note reaches the agreement of their instance as it was said."""

from __future__ import annotations

import pytest

from kvferry import Done, Failure, FailureCode, Outcome, RankAgreement, Status
from kvferry.reference.transfer.messages import (
    AbortCommand,
    Command,
    EndedNote,
    Note,
    OpenCommand,
    ReceiveCommand,
    ReleasedNote,
    decode_command,
    decode_note,
    encode,
    take_note,
)

GONE = Failure(FailureCode.PEER_GONE, "prefill/1 is gone")


@pytest.mark.parametrize(
    "command",
    [
        OpenCommand("r", "room", 1.5, b"digest"),
        ReceiveCommand("r", 7, 1.5, b"digest", "prefill", 40, 8, [3, 0, 1], None),
        AbortCommand("r"),
    ],
)
def test_a_command_arrives_as_it_was_said(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "note", [EndedNote("r", GONE), ReleasedNote("r", {"runs": 8}, {"runs": 9})]
)
def test_a_note_arrives_as_it_was_said(note: Note) -> None:
    assert decode_note(encode(note)) == note


@pytest.mark.parametrize("outcome", [Done(b"first"), Done(), GONE])
def test_an_agreement_takes_the_outcome_of_a_handle(outcome: Outcome) -> None:
    agreement = RankAgreement(1)
    take_note(agreement, 0, EndedNote.of("r", outcome))
    assert agreement.failure == (outcome if outcome is GONE else None)
    assert agreement.metadata == getattr(outcome, "metadata", b"")


def test_notes_are_taken_by_the_agreement() -> None:
    agreement = RankAgreement(2)
    take_note(agreement, 0, EndedNote("r", metadata=b"first"))
    take_note(agreement, 1, EndedNote("r"))
    assert (agreement.status, agreement.metadata) == (Status.DONE, b"first")
    take_note(agreement, 0, ReleasedNote("r", {"runs": 8}))
    take_note(agreement, 1, ReleasedNote("r", {"runs": 4, "slices": 1}))
    assert (agreement.is_released, agreement.carried) == (True, {"runs": 12, "slices": 1})
