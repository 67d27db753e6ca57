"""The cache of completed transfer handles."""

from __future__ import annotations

from kvferry.transports.nixl.peers import MAX_HANDLES, DescriptorHandles
from kvferry.transports.single_descriptor import SingleDescriptor


class Handle:
    """Stands for a NIXL transfer handle."""

    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def piece(number: int) -> SingleDescriptor:
    return SingleDescriptor(0, number, 0, 0, 1)


def test_acquire_removes_the_handle() -> None:
    handles, handle = DescriptorHandles(), Handle()
    assert handles.acquire(piece(1)) is None
    handles.keep(piece(1), handle)
    assert handles.acquire(piece(2)) is None
    assert handles.acquire(piece(1)) is handle
    assert handles.acquire(piece(1)) is None
    assert not handle.num_released


def test_handles_of_several_pieces_are_released() -> None:
    handles, handle = DescriptorHandles(), Handle()
    handles.keep(None, handle)
    assert handles.acquire(None) is None
    assert handle.num_released == 1


def test_a_second_handle_of_one_piece_is_released() -> None:
    handles, one, other = DescriptorHandles(), Handle(), Handle()
    handles.keep(piece(1), one)
    handles.keep(piece(1), other)
    assert (one.num_released, other.num_released) == (0, 1)
    assert handles.acquire(piece(1)) is one


def test_the_oldest_handles_are_released_when_full() -> None:
    handles, many = DescriptorHandles(), [Handle() for _ in range(MAX_HANDLES + 1)]
    for number, handle in enumerate(many):
        handles.keep(piece(number), handle)
    assert [handle.num_released for handle in many] == [1, *[0] * MAX_HANDLES]
    handles.clear()
    assert [handle.num_released for handle in many] == [1] * len(many)
    assert handles.acquire(piece(1)) is None
