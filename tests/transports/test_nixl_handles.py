"""Transfers that are over are posted again for the same piece, and given back in the end."""

from __future__ import annotations

from kvferry.transports.nixl.peers import MAX_HANDLES, DescriptorHandles
from kvferry.transports.single_descriptor import Single


class Handle:
    """NIXL's, as far as it is kept."""

    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def piece(number: int) -> Single:
    return Single(0, number, 0, 0, 1)


def test_whoever_takes_one_has_it_alone() -> None:
    handles, handle = DescriptorHandles(), Handle()
    assert handles.acquire(piece(1)) is None
    handles.keep(piece(1), handle)
    assert handles.acquire(piece(2)) is None
    assert handles.acquire(piece(1)) is handle
    assert handles.acquire(piece(1)) is None
    assert not handle.num_released


def test_what_is_not_a_single_piece_is_given_back() -> None:
    handles, handle = DescriptorHandles(), Handle()
    handles.keep(None, handle)
    assert handles.acquire(None) is None
    assert handle.num_released == 1


def test_the_second_of_one_piece_is_given_back() -> None:
    handles, one, other = DescriptorHandles(), Handle(), Handle()
    handles.keep(piece(1), one)
    handles.keep(piece(1), other)
    assert (one.num_released, other.num_released) == (0, 1)
    assert handles.acquire(piece(1)) is one


def test_no_more_are_kept_than_there_is_room_for_and_all_are_given_back() -> None:
    handles, many = DescriptorHandles(), [Handle() for _ in range(MAX_HANDLES + 1)]
    for number, handle in enumerate(many):
        handles.keep(piece(number), handle)
    assert [handle.num_released for handle in many] == [1, *[0] * MAX_HANDLES]
    handles.clear()
    assert [handle.num_released for handle in many] == [1] * len(many)
    assert handles.acquire(piece(1)) is None
