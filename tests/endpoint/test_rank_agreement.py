"""The combined state of a room at all ranks, in any order of their outcomes."""

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


def test_a_release_does_not_end_a_room() -> None:
    agreement = RankAgreement(1)
    agreement.release(0)
    assert (agreement.status, agreement.is_released) == (Status.MOVING, True)


@pytest.mark.parametrize("outcomes", [*permutations([Done(b"first"), FOLLOWED, CAUSE])])
def test_one_failure_fails_the_room_with_its_cause(outcomes: tuple[Outcome, ...]) -> None:
    agreement = RankAgreement(3)
    for rank, outcome in enumerate(outcomes):
        agreement.end(rank, outcome)
    assert (agreement.status, agreement.failure) == (Status.FAILED, CAUSE)


def test_a_failure_counts_before_other_ranks_have_ended() -> None:
    agreement = RankAgreement(3)
    agreement.end(1, FOLLOWED)
    assert (agreement.status, agreement.failure) == (Status.FAILED, FOLLOWED)


def test_only_the_first_outcome_and_release_of_a_rank_count() -> None:
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


def test_unknown_ranks_are_refused() -> None:
    agreement = RankAgreement(2)
    with pytest.raises(InputError, match="rank must be from 0 to 1, not 2"):
        agreement.end(2, Done())
    with pytest.raises(InputError, match="rank must be from 0 to 1, not -1"):
        agreement.release(-1)
    with pytest.raises(InputError, match="num_ranks must be at least 1, not 0"):
        RankAgreement(0)
