"""A write of several batches, with a scripted NIXL agent."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.ids import Op
from kvferry.transports.nixl.batches import DescriptorBatch
from kvferry.transports.nixl.peers import NixlConnection, NixlMetadata, NixlPeer
from kvferry.transports.nixl.writes import MAX_IN_FLIGHT, NixlWrite
from kvferry.transports.single_descriptor import SingleDescriptor


class Handle:
    """A transfer handle that counts its releases."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


class Agent:
    """Makes handles 0, 1, 2, ... A submitted one is in flight until its number is in ``done``."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.submitted: list[int] = []
        self.done: set[int] = set()
        self.unpreparable: set[int] = set()
        self.broken: set[int] = set()

    def get_xfer_descs(self, rows: Any, _memory_type: str) -> Any:
        return rows

    def initialize_xfer(self, *_: Any) -> Handle:
        if len(self.handles) in self.unpreparable:
            raise KeyError("outside")
        self.handles.append(Handle(len(self.handles)))
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        self.submitted.append(handle.number)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.number in self.broken:
            raise ConnectionError("gone")
        return "DONE" if handle.number in self.done else "PROC"


def batches(count: int, single: SingleDescriptor | None = None) -> list[DescriptorBatch]:
    return [DescriptorBatch([(0, 1, 0)], [(0, 1, 0)], "VRAM", "VRAM", single)] * count


def write_of(made: list[DescriptorBatch]) -> NixlWrite:
    peer = NixlPeer(NixlMetadata(name="peer", agent=b"", regions=()))
    return NixlWrite(NixlConnection(peer), Op(1), made)


def submit_all(write: NixlWrite, agent: Agent) -> None:
    while write.can_submit:
        write.progress(agent)


def advance(write: NixlWrite, agent: Agent) -> bool:
    """Advance a write; return whether it is over."""
    write.progress(agent)
    return write.is_over


def test_batches_are_submitted_while_others_are_in_flight() -> None:
    agent, write = Agent(), write_of(batches(MAX_IN_FLIGHT + 2))
    submit_all(write, agent)
    assert agent.submitted == list(range(MAX_IN_FLIGHT))
    write.progress(agent)
    assert len(agent.submitted) == MAX_IN_FLIGHT
    agent.done = {3, 5}
    write.progress(agent)
    submit_all(write, agent)
    assert len(agent.submitted) == MAX_IN_FLIGHT + 2
    agent.done = set(range(MAX_IN_FLIGHT + 1))
    assert not advance(write, agent)
    agent.done.add(MAX_IN_FLIGHT + 1)
    assert advance(write, agent)
    assert [handle.num_released for handle in agent.handles] == [1] * (MAX_IN_FLIGHT + 2)


def test_an_empty_write_is_over() -> None:
    assert write_of([]).is_over


def test_a_batch_that_cannot_be_prepared_ends_the_write_after_those_in_flight() -> None:
    agent, write = Agent(), write_of(batches(5))
    agent.unpreparable = {2}
    submit_all(write, agent)
    assert agent.submitted == [0, 1]
    assert not advance(write, agent)
    agent.done = {0, 1}
    assert advance(write, agent)
    assert write.problem == "KeyError: 'outside'"
    assert agent.submitted == [0, 1]


def test_cancelling_drops_what_was_not_submitted() -> None:
    agent, write = Agent(), write_of(batches(3))
    write.progress(agent)
    assert write.cancel_rest()
    agent.done = {0}
    assert advance(write, agent)
    assert agent.submitted == [0]
    assert not write_of(batches(3)).cancel_rest()


def test_every_handle_of_a_broken_connection_is_released_once() -> None:
    piece = SingleDescriptor(0, 0, 0, 0, 1)
    agent, write = Agent(), write_of(batches(3, piece))
    submit_all(write, agent)
    agent.done, agent.broken = {0}, {1}
    with pytest.raises(ConnectionError):
        write.progress(agent)
    write.release()
    write.remote.peer.handles.clear()
    assert [handle.num_released for handle in agent.handles] == [1, 1, 1]


def test_the_handle_of_a_single_piece_is_used_again() -> None:
    piece = SingleDescriptor(0, 0, 0, 0, 1)
    agent, write = Agent(), write_of(batches(1, piece))
    agent.done = {0}
    write.progress(agent)
    again = NixlWrite(write.remote, Op(2), batches(1, piece))
    assert advance(again, agent)
    assert agent.submitted == [0, 0]
