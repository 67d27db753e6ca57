"""Scatters: to a target's driver, the ports to the copier and to memory that others write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvferry.ids import Op, Room, Session
from kvferry.plan.bind import Image, Pair, bind
from kvferry.protocol.events import Cancel, Connect, Event, Scatter, Scattered, Write
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.protocol.target import TargetMachine
from kvferry.runtime.copier import Copied, Copier, CopyJob
from kvferry.runtime.incoming import Incoming
from kvferry.runtime.metrics import Meter
from kvferry.runtime.mover.mover import Mover
from kvferry.runtime.owner.rooms import RoomTable
from kvferry.runtime.setup import EndpointSetup

log = logging.getLogger("kvferry.runtime")


class Scatters:
    """StagingMemory whose bytes are on their way into pages. A target itself writes to nobody."""

    def __init__(
        self,
        setup: EndpointSetup,
        rooms: RoomTable[Incoming],
        mover: Mover,
        copier: Copier,
        meter: Meter,
    ) -> None:
        self._setup = setup
        self._rooms = rooms
        self._mover = mover
        self._copier = copier
        self._meter = meter
        self._room_of: dict[Op, Room] = {}

    def attach(self, machine: TargetMachine, answer: Callable[[Event], None]) -> None:
        """Whom this scatters for, and who hears how it went."""
        self._machine = machine
        self._answer = answer

    def scatter(self, action: Scatter) -> None:
        """Copy a slot into its pages."""
        slots, handle = self._setup.slots, self._rooms.get(action.room)
        assert slots is not None
        assert handle is not None
        plan = self._machine.rooms[action.room].plan
        pair = Pair(action.source.rank, self._setup.member.rank)
        make = partial(bind, plan, pair, action.request, Image(), handle.side, action.blocks)
        from_ = (slots.address(action.slot),)
        self._room_of[action.op] = action.room
        self._copier.submit(CopyJob(action.op, make, from_, self._setup.addresses))

    def copied(self, news: Copied) -> None:
        """Well or not, it is over and touches nothing any more."""
        room = self._room_of.pop(news.op)
        if news.problem:
            log.error("scatter-failed room=%r problem=%r", room, news.problem)
            failure = Failure.of(FailureCode.TRANSPORT, f"a scatter failed: {news.problem}")
            self._answer(Cancel(room, failure))
        self._answer(Scattered(news.op))

    # ------------------------------------------------------------ memory of others

    def connect(self, action: Connect) -> None:
        """Sources write here, by what they chose; nothing of theirs is reached."""
        (offer,) = action.transports
        log.info(
            "written-by endpoint=%s peer=%s transport=%s",
            *(self._setup.member.peer, action.peer, offer.name),
        )
        self._meter.linked(action.peer, offer.name)
        self._mover.let_write(action.session, offer.name)

    def write(self, action: Write) -> None:
        """Never asked for."""
        raise AssertionError(f"a target was asked for {action!r}")

    def cut(self, session: Session) -> None:
        """Nothing of ours is under way."""

    def forget(self, session: Session) -> None:
        """It is written by nobody any more."""
        self._mover.forget(session)
