"""A target endpoint: one decode rank, as an engine holds it. For any thread."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from math import inf
from typing import ClassVar

from kvferry.digest import checked_digest
from kvferry.discovery.records import InstanceView, demand_name
from kvferry.endpoint.arguments import deadline_in, token_count
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.incoming import Incoming, wanted_pages
from kvferry.endpoint.loop.channels import TargetChannel
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.loop import EndpointLoop
from kvferry.endpoint.loop.probes import PeerProbes
from kvferry.endpoint.loop.scatters import StagedScatters
from kvferry.endpoint.loop.sides import TargetRoomEnds, TargetSide
from kvferry.endpoint.rank import RankEndpoint
from kvferry.endpoint.runner.runner import TargetPorts, TargetRunner
from kvferry.errors import InputError
from kvferry.ids import Room
from kvferry.memory.page_tables import Pages, Rows
from kvferry.plan.plan import Request
from kvferry.protocol.events import Event, ReceiveRequest
from kvferry.protocol.messages import MAX_SLOTS
from kvferry.protocol.target import TargetMachine
from kvferry.security.keys import ClusterKey, checked_bind_address
from kvferry.telemetry.tags import RoomTag


class TargetEndpoint(RankEndpoint[Incoming]):
    """One decode rank."""

    writable: ClassVar[bool] = True
    role: ClassVar[str] = "target"

    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        checked_bind_address(config.host, 0, key)
        return None

    def _most_slots(self, config: EndpointConfig) -> int:
        return MAX_SLOTS

    def _make_owner(self, config: EndpointConfig, key: ClusterKey | None) -> EndpointLoop:
        setup, rooms, observer = self._setup, self._rooms, self._observer

        def answer(event: Event) -> None:
            """Take the answer of a port."""
            runner.answer(event)

        machine = TargetMachine(setup.identity, config.protocol, setup.memory.map, setup.staging)
        discovery_timeout_s = (
            inf if config.discovery_timeout_s is None else config.discovery_timeout_s
        )
        directory = Directory(self._client, self._learn, discovery_timeout_s)
        channel = TargetChannel(
            setup.member.peer,
            self._poller,
            observer,
            answer,
            key,
            directory.address_of,
            config.protocol.silence_s,
        )
        scatters = StagedScatters(
            setup=setup,
            rooms=rooms,
            transport_thread=self._transport_thread,
            copier=self._copier,
            observer=observer,
            answer=answer,
            join=channel.join,
        )
        probes, ends = PeerProbes(self._prober), TargetRoomEnds(rooms, machine, scatters)
        runner = TargetRunner(machine, TargetPorts(channel, scatters, probes, ends))
        role = TargetSide(runner, self._step_machine, ends, scatters, channel, directory, observer)
        self._role = role
        return self._owner_of(runner, role, channel)

    def _learn(self, name: str, view: InstanceView | None) -> None:
        """On the discovery client's thread: an instance is complete, has changed, or has ended."""
        self._owner.tell(partial(self._role.learn, name, view))

    def receive(  # noqa: PLR0913 - what an engine has to say, by keyword
        self,
        room: Room,
        *,
        prefill: str | InstanceView,
        tokens: int,
        prefix: int = 0,
        pages: Pages,
        states: Rows | None = None,
        deadline_s: float | None = None,
        digest: bytes = b"",
        request: str = "",
        traceparent: str = "",
    ) -> Incoming:
        """Have a request's cache written into these pages by that prefill instance.

        ``pages`` are all of the request's, or only those behind the ``prefix``
        that is cached here already. They are held until the room is released.
        ``digest`` is that of the request (``kvferry.digest_of``): the room is done only if
        every source says that it has computed just that. ``request`` and ``traceparent`` name
        whose room it is in logs and in its trace.
        """
        self._demand_instance(prefill)
        asked = Request(token_count(tokens), token_count(prefix, "prefix"))
        tables = self._validator.tables(asked, pages, states)
        deadline = deadline_in(self._deadline_s if deadline_s is None else deadline_s)
        wanted = ReceiveRequest(room, asked, tables, deadline, checked_digest(digest))
        member = self._setup.member
        everything = partial(wanted_pages, member.layout, member.rank, wanted)
        handle = Incoming(wanted, prefill, self._abort, everything)
        handle.tag = RoomTag.of(request, traceparent)
        self._owner.rooms.add(handle)
        self._owner.tell(partial(self._role.receive, handle))
        return handle

    def decline(
        self, room: Room, *, prefill: str | InstanceView, deadline_s: float | None = None
    ) -> None:
        """Tell a prefill instance that this rank will not receive a room.

        Its ranks then let go of the room's pages at once instead of at their deadline; the room
        fails there with ``aborted``. For a room that was never received here: ``abort`` of a
        handle tells them by itself. Returns at once. An instance that is not known yet is told
        when it is found, within ``deadline_s``.
        """
        self._demand_instance(prefill)
        self._owner.rooms.demand_unknown(room)
        deadline = deadline_in(self._deadline_s if deadline_s is None else deadline_s)
        self._owner.tell(partial(self._role.decline, room, prefill, deadline))

    def _demand_instance(self, prefill: object) -> None:
        if isinstance(prefill, str):
            if self._client is None:
                raise InputError(
                    "finding an instance by its name takes a discovery service; pass its URL"
                )
            demand_name(prefill)
        elif not isinstance(prefill, InstanceView):
            raise InputError(f"prefill is an instance's name or view, not {prefill!r:.200}")
