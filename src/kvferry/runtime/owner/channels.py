"""Channels: to a driver, the port where frames go out; to the loop, where they come in.

A source answers along the route of a target's latest frame. A target has a connection to
each source, at the address that the source's instance gave last. What a turn has to say
to one peer leaves in one message, or in a few: a peer that has nothing to do meanwhile can
begin with the first of many.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from kvferry.errors import KvferryError
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.codec import BadFrame, FrameFault, decode, encode
from kvferry.protocol.events import Barred, Cancel, Event
from kvferry.protocol.messages import Envelope, RoomMessage
from kvferry.runtime.bundles import bundle, unbundle
from kvferry.runtime.control import (
    LINGER_MS,
    ControlClient,
    ControlServer,
    ZmqSocket,
    new_context,
)
from kvferry.runtime.driver.driver import frame_event
from kvferry.runtime.keys import ClusterKey
from kvferry.runtime.owner.poller import Poller
from kvferry.runtime.owner.stories import StoryBook
from kvferry.runtime.telemetry.metrics import Meter

log = logging.getLogger("kvferry.runtime")

# A connection may fail once in the middle of a restart; a wrong key fails every time.
SHUT_AFTER = 3
# So many frames leave before the turn is over.
MOST_WAITING = 8


class Dropped(NamedTuple):
    """Connections have ended, to ``peer`` or to somebody: a sign, and no proof."""

    peer: Peer | None


class Channel(ABC):
    """What both sides' channels have in common."""

    def __init__(self, me: Peer, poller: Poller, meter: Meter) -> None:
        self._me = me
        self._poller = poller
        self._meter = meter
        self._answer: Callable[[Event], None] = lambda _: None
        self._stories = StoryBook(0)
        self._num_waiting = 0

    def attach(self, answer: Callable[[Event], None], stories: StoryBook | None = None) -> None:
        """Who hears of a frame that can't be sent, and who writes down what was said."""
        self._answer = answer
        self._stories = self._stories if stories is None else stories

    @abstractmethod
    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """What has come, from those that are ready."""

    @abstractmethod
    def _put(self, peer: Peer, envelope: Envelope) -> None:
        """Have a frame sent at the end of this turn. Raises ``KvferryError``."""

    @abstractmethod
    def _send_waiting(self) -> None:
        """Send what was put."""

    @abstractmethod
    def close(self) -> None:
        """Say nothing more."""

    def flush(self) -> None:
        """Send what this turn had to say."""
        if self._num_waiting:
            self._num_waiting = 0
            self._send_waiting()

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Have a frame sent at the end of this turn, or before. It may be lost."""
        try:
            self._put(peer, envelope)
            self._stories.said(peer, envelope)
            self._num_waiting += 1
            if self._num_waiting >= MOST_WAITING:
                self.flush()
        except KvferryError as error:
            # A frame that can't be made concerns one room, and fails that room alone.
            log.warning("unsendable endpoint=%s peer=%s error=%s", self._me, peer, error)
            self._meter.refused("unsendable")
            if isinstance(envelope.body, RoomMessage):
                room: Room = envelope.body.room
                self._answer(Cancel(room))

    def _events(self, message: bytes) -> Iterator[tuple[Session, Event]]:
        """What a message holds, and in which session it was said."""
        frames = unbundle(message)
        if frames is None:
            self._meter.refused("frame-foreign")
        for frame in frames or ():
            decoded = decode(frame)
            event = frame_event(decoded)
            if isinstance(decoded, BadFrame):
                self._meter.refused(f"frame-{decoded.fault}")
                if decoded.fault is not FrameFault.VERSION or decoded.header is None:
                    continue
                session = decoded.header.session
            else:
                session = decoded.session
            assert event is not None
            yield session, event


class SourceChannel(Channel):
    """A source's: one bound socket, spoken to by many targets."""

    def __init__(self, me: Peer, poller: Poller, meter: Meter, server: ControlServer) -> None:
        super().__init__(me, poller, meter)
        self._server = server
        self._routes: dict[Session, bytes] = {}
        self._outbox: dict[bytes, list[bytes]] = {}
        for one in server.sockets:
            poller.watch(one)

    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """Frames, and the routes along which they would be answered."""
        server = self._server
        if not any(one in ready for one in server.sockets):
            return
        for route, message in server.receive(ready):
            for session, event in self._events(message):
                self._routes[session.greeting] = route
                yield event
        self._meter.total("connection", server.counts["refused"])
        if server.counts.pop("dropped", 0):
            yield Dropped(None)

    def _put(self, peer: Peer, envelope: Envelope) -> None:
        route = self._routes.get(envelope.session.greeting)
        if route is not None:
            self._outbox.setdefault(route, []).append(encode(envelope))

    def _send_waiting(self) -> None:
        """Send what was put."""
        for route, frames in self._outbox.items():
            for message in bundle(frames):
                self._server.send(route, message)
            self._poller.used(self._server.socket)
        self._outbox.clear()

    def keep(self, sessions: Iterable[Session]) -> None:
        """Forget the routes of all other sessions."""
        known = {session.greeting for session in sessions}
        self._routes = {s: route for s, route in self._routes.items() if s in known}

    def close(self) -> None:
        """Close the socket."""
        for one in self._server.sockets:
            self._poller.unwatch(one)
        self._server.close()


class TargetChannel(Channel):
    """A target's: a connection to each source. ``address_of`` knows where one is, if anybody."""

    def __init__(
        self,
        me: Peer,
        poller: Poller,
        meter: Meter,
        key: ClusterKey | None,
        address_of: Callable[[Peer], str | None],
    ) -> None:
        super().__init__(me, poller, meter)
        self._key = key
        self._address_of = address_of
        self._context = new_context()
        self._clients: dict[Peer, tuple[str, ControlClient]] = {}
        self._by_socket: dict[ZmqSocket, Peer] = {}
        self._outbox: dict[ControlClient, list[bytes]] = {}

    @property
    def peers(self) -> set[Peer]:
        """To whom there is a connection."""
        return set(self._clients)

    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """Frames, and what became of connections."""
        peers = {self._by_socket[one] for one in ready if one in self._by_socket}
        for peer in peers:
            _, client = self._clients[peer]
            for message in client.receive(ready):
                for _, event in self._events(message):
                    yield event
            if client.counts.pop("dropped", 0):
                yield Dropped(peer)
            if client.counts["refused"] >= SHUT_AFTER:
                client.counts.clear()
                yield Barred(peer, f"{peer} has another cluster key; give both the same")

    def _put(self, peer: Peer, envelope: Envelope) -> None:
        client = self._client_for(peer)
        if client is not None:
            self._outbox.setdefault(client, []).append(encode(envelope))

    def _send_waiting(self) -> None:
        """Send what was put."""
        for client, frames in self._outbox.items():
            for message in bundle(frames):
                client.send(message)
            self._poller.used(client.socket)
        self._outbox.clear()

    def _client_for(self, peer: Peer) -> ControlClient | None:
        address, known = self._address_of(peer), self._clients.get(peer)
        if address is None or (known and known[0] == address):
            return known[1] if known else None
        if known:
            self.drop(peer)
        client = ControlClient(address, self._key, self._context)
        self._clients[peer] = address, client
        for one in client.sockets:
            self._poller.watch(one)
            self._by_socket[one] = peer
        return client

    def drop(self, peer: Peer) -> None:
        """Nobody there is needed any more."""
        _, client = self._clients.pop(peer)
        self._outbox.pop(client, None)
        for one in client.sockets:
            self._poller.unwatch(one)
            del self._by_socket[one]
        client.close(0)

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self._clients):
            self.drop(peer)
        self._context.destroy(LINGER_MS)
