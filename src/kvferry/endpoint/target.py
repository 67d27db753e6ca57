"""The target endpoint: one decode rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import ClassVar

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.discovery.records import InstanceView, demand_name
from kvferry.endpoint.arguments import token_count
from kvferry.endpoint.config import PROVEN, EndpointConfig
from kvferry.endpoint.control.unix import UnixListener
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.loop.channels import TargetChannel
from kvferry.endpoint.loop.directory import Directory
from kvferry.endpoint.loop.proofs import ContentProofs
from kvferry.endpoint.loop.scatters import StagedScatters
from kvferry.endpoint.loop.sides import TargetSide
from kvferry.endpoint.rank import RankEndpoint
from kvferry.endpoint.runner.runner import TargetPorts, TargetRunner
from kvferry.errors import InputError
from kvferry.ids import Room
from kvferry.memory.page_tables import Pages, Rows
from kvferry.plan.places import PageTable
from kvferry.plan.plan import Request
from kvferry.prefix import PrefixChain
from kvferry.protocol.events import Event, ReceiveRequest
from kvferry.protocol.target import TargetMachine
from kvferry.security.keys import ClusterKey, checked_bind_address
from kvferry.telemetry.steps import RoomTag

log = logging.getLogger("kvferry.endpoint")


class TargetEndpoint(RankEndpoint[Incoming]):
    """Endpoint of one decode rank: receives rooms from prefill instances.

    Sources write into its pools. See ``RankEndpoint`` for its arguments.
    """

    writable: ClassVar[bool] = True
    role: ClassVar[str] = "target"
    _side: TargetSide

    def _listen(
        self, config: EndpointConfig, key: ClusterKey | None, undo: ExitStack
    ) -> UnixListener | None:
        checked_bind_address(config.host, 0, key)
        return None

    def _make_side(self, key: ClusterKey | None) -> TargetSide:
        setup, config, rooms, observer = self._setup, self._config, self._rooms, self._observer

        def answer(event: Event) -> None:
            runner.answer(event)

        timeout_s = config.discovery_timeout_s
        directory = Directory(self._client, self._on_view, inf if timeout_s is None else timeout_s)
        channel = TargetChannel(
            *(setup.me, self._poller, observer, answer),
            *(key, directory.address_of, config.protocol.silence_s),
        )

        def tables_of(room: Room) -> Mapping[str, PageTable]:
            handle = rooms.get(room)
            return handle.request.page_tables if handle else {}

        scatters = StagedScatters(
            setup=setup,
            rooms=rooms,
            transport_thread=self._transport_thread,
            copier=self._copier,
            observer=observer,
            answer=answer,
            connect_unix=channel.connect_unix,
            proofs=ContentProofs(
                setup=setup,
                copier=self._copier,
                sum_cells=self._sum_cells,
                answer=answer,
                tables_of=tables_of,
            ),
        )
        protocol = _protocol_config(config)
        machine = TargetMachine(setup.identity, protocol, setup.memory.map, setup.staging)
        runner = TargetRunner(machine, TargetPorts(channel, scatters, self._prober, rooms))
        return TargetSide(
            *(runner, rooms, channel, observer), self._transport_thread, scatters, directory
        )

    def _on_view(self, name: str, view: InstanceView | None) -> None:
        """Pass a view to the loop. On the discovery client's thread."""
        self._loop.submit(partial(self._side.update_instance, name, view))

    def receive(  # noqa: PLR0913 - arguments of a request, by keyword
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
        """Ask a prefill instance for a request's cache, and return the room's handle at once.

        ``room``: the id that the source's engine has for the same transfer.
        ``prefill``: the instance's name, which takes a discovery service, or a view of it.
        ``tokens``: the request's length. ``prefix``: its first tokens that are cached here already.
        ``pages``: all pages of the request, or only those behind the prefix.
        ``states``: the request's state rows by group.
        ``deadline_s``: seconds from now after which the room fails; None takes the configured.
        ``digest``: the request's digest (``kvferry.digest_of``). The room is done only if every
        source has computed a request with the same digest.
        ``request``, ``traceparent``: the request's id and W3C trace context, for logs and traces.

        The engine must not use the pages until the handle is done, nor reuse them until it is
        ``released``. Raises ``InputError`` for an invalid argument, and ``Misuse`` if the room is
        open already or the endpoint is closing.
        """
        length = Request(token_count(tokens), token_count(prefix, "prefix"))
        wanted = self._wanted(room, length, pages, states, deadline_s, digest)
        return self._receive(wanted, prefill, RoomTag.of(request, traceparent))

    def pull(  # noqa: PLR0913 - arguments of a request, by keyword
        self,
        room: Room,
        *,
        holder: str | InstanceView,
        chain: PrefixChain,
        prefix: int = 0,
        pages: Pages,
        states: Rows | None = None,
        deadline_s: float | None = None,
        request: str = "",
        traceparent: str = "",
    ) -> Incoming:
        """Ask any instance for the longest prefix of a sequence that it holds.

        Returns the room's handle at once. When it is done, its ``num_tokens`` first tokens are in
        the pages: 0 if the holder had none of them. All ranks of this instance get one number, so
        no rank is done with tokens before every rank has called this.

        ``room``: an id of its own, the same at each rank of this instance.
        ``holder``: an instance with source endpoints: its name, or a view of it.
        ``chain``: the sequence (``prefix_chain``). ``chain.first(n)`` asks for n tokens at most.
        ``pages``: pages for the whole chain, in all groups; those behind what was pulled stay
        unwritten. The other arguments are those of ``receive``, and so are errors and lifetime.
        """
        if not chain.num_tokens:
            raise InputError("the chain is empty; pull at least 16 tokens")
        length = Request(chain.num_tokens, token_count(prefix, "prefix"))
        wanted = self._wanted(room, length, pages, states, deadline_s, b"")
        wanted = replace(wanted, chain=chain)
        return self._receive(wanted, holder, RoomTag.of(request, traceparent))

    def _wanted(
        self,
        room: Room,
        length: Request,
        pages: Pages,
        states: Rows | None,
        deadline_s: float | None,
        digest: bytes,
    ) -> ReceiveRequest:
        tables = self._validator.tables(length, pages, states)
        return ReceiveRequest(room, length, tables, self._deadline(deadline_s), digest)

    def _receive(
        self, wanted: ReceiveRequest, source: str | InstanceView, tag: RoomTag
    ) -> Incoming:
        self._check_prefill(source)
        setup = self._setup
        handle = Incoming(wanted, source, setup.identity.layout, setup.me.rank, self._abort)
        handle.tag = tag
        self._rooms.add(handle)
        self._loop.submit(partial(self._side.receive, handle))
        return handle

    def decline(
        self, room: Room, *, prefill: str | InstanceView, deadline_s: float | None = None
    ) -> None:
        """Tell a prefill instance that this rank will not receive a room. Returns at once.

        Its ranks then fail the room with ``aborted`` and release its pages at once instead of at
        their deadline. Only for a room that was never received here: aborting a handle notifies
        the sources too. If the instance is not known yet, it is notified when it is found, within
        ``deadline_s`` seconds (None takes the configured).

        Raises ``InputError`` for an invalid argument, and ``Misuse`` if the room is open here.
        """
        self._check_prefill(prefill)
        self._rooms.check_unused(room)
        deadline = self._deadline(deadline_s)
        self._loop.submit(partial(self._side.decline, room, prefill, deadline))

    def _check_prefill(self, prefill: object) -> None:
        if isinstance(prefill, str):
            if self._client is None:
                raise InputError(
                    "finding an instance by its name takes a discovery service; pass its URL"
                )
            demand_name(prefill)
        elif not isinstance(prefill, InstanceView):
            raise InputError(f"prefill must be an instance's name or view, not {prefill!r:.200}")


def _protocol_config(config: EndpointConfig) -> ProtocolConfig:
    """Return the machine's configuration with the parts of rooms and cells to prove."""
    rooms, share = PROVEN[config.proof]
    return replace(config.protocol, proof_rooms=rooms, proof_share=share)
