"""The ranks of one instance agree on a room, whatever the order of their words."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvferry import Done, Failure, FailureCode, InputError, Outcome, RankAgreement, Status

FOLLOWED = Failure(FailureCode.ABORTED, "given up at decode")
CAUSE = Failure(FailureCode.PEER_GONE, "prefill/1 is gone")


def test_a_room_is_done_when_all_are_and_free_when_all_have_released() -> None:
    agreement = RankAgreement(3)
    seen = []
    for rank, metadata in ((2, b"first"), (0, b""), (1, b"")):
        agreement.end(rank, Done(metadata))
        seen.append((agreement.status, agreement.is_released))
        agreement.release(rank)
    moving = (Status.MOVING, False)
    assert seen == [moving, moving, (Status.DONE, False)]
    assert agreement.is_released
    assert agreement.metadata == b"first"


def test_a_release_alone_ends_nothing() -> None:
    agreement = RankAgreement(1)
    agreement.release(0)
    assert (agreement.status, agreement.is_released) == (Status.MOVING, True)


@pytest.mark.parametrize("outcomes", [*permutations([Done(b"first"), FOLLOWED, CAUSE])])
def test_one_failure_fails_the_room_and_its_cause_is_told(outcomes: tuple[Outcome, ...]) -> None:
    agreement = RankAgreement(3)
    for rank, outcome in enumerate(outcomes):
        agreement.end(rank, outcome)
    assert (agreement.status, agreement.failure) == (Status.FAILED, CAUSE)


def test_a_failure_is_told_before_the_others_have_spoken() -> None:
    agreement = RankAgreement(3)
    agreement.end(1, FOLLOWED)
    assert (agreement.status, agreement.failure) == (Status.FAILED, FOLLOWED)


def test_what_is_said_twice_is_said_once() -> None:
    agreement = RankAgreement(2)
    agreement.end(0, CAUSE)
    agreement.end(0, Done())
    agreement.release(0, {"runs": 8})
    agreement.release(0, {"runs": 8})
    assert (agreement.failure, agreement.carried) == (CAUSE, {"runs": 8})
    assert not agreement.is_released


def test_bytes_of_all_ranks_add_up() -> None:
    agreement = RankAgreement(2)
    agreement.release(0, {"runs": 8, "staged": 2})
    agreement.release(1, {"runs": 1})
    assert agreement.carried == {"runs": 9, "staged": 2}


def test_a_rank_that_is_not_there_has_no_word() -> None:
    agreement = RankAgreement(2)
    with pytest.raises(InputError, match="ranks here are 0 to 1; there is no rank 2"):
        agreement.end(2, Done())
    with pytest.raises(InputError, match="there is no rank -1"):
        agreement.release(-1)
    with pytest.raises(InputError, match="at least 1 rank, not 0"):
        RankAgreement(0)
