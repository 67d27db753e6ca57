"""Channels: to a runner, the port where frames go out; to the loop, where they come in.

A source answers along the route of a target's latest frame. A target has a connection to
each source, at the address that the source's instance gave last, and to one that has a listener
on this host a line beside it, which it talks on while it lasts. What a turn has to say
to one peer leaves in one message, or in a few: a peer that has nothing to do meanwhile can
begin with the first of many.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kvferry.endpoint.control.bundles import bundle, unbundle
from kvferry.endpoint.control.sockets import (
    LINGER_MS,
    SILENCE_S,
    ControlClient,
    ControlServer,
    ZmqSocket,
    new_context,
)
from kvferry.endpoint.control.unix import UnixChannel, UnixListener, UnixServer, connect
from kvferry.endpoint.loop.poller import Poller
from kvferry.endpoint.loop.unix_channels import UnixChannels
from kvferry.endpoint.runner.runner import frame_event
from kvferry.errors import KvferryError
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.codec import BadFrame, FrameFault, decode, encode
from kvferry.protocol.events import Cancel, ConnectRefused, Event
from kvferry.protocol.messages import Envelope, RoomMessage
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.observer import Observer

log = logging.getLogger("kvferry.endpoint")

# A connection may fail once in the middle of a restart; a wrong key fails every time.
SHUT_AFTER = 3
W = TypeVar("W")
# So many frames leave before the turn is over, and so does what has waited for longer than this.
MOST_WAITING = 8
MOST_S = 100e-6


class Dropped(NamedTuple):
    """Connections have ended, to ``peer`` or to somebody: a sign, and no proof."""

    peer: Peer | None


class Channel(ABC, Generic[W]):
    """What both sides' channels have in common. ``W`` are the ways that lead to peers."""

    def __init__(
        self, me: Peer, poller: Poller, observer: Observer, answer: Callable[[Event], None]
    ) -> None:
        self._me = me
        self._poller = poller
        self._observer = observer
        # Hears of a frame that can't be sent.
        self._answer = answer
        self._lines = UnixChannels(poller, observer)
        # Frames that wait to be sent.
        self._outboxes: dict[W | UnixChannel, list[bytes]] = {}
        self._num_waiting = 0
        self._flushed = 0.0

    @abstractmethod
    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """What has come, from those that are ready."""

    @abstractmethod
    def _way_to(self, peer: Peer, session: Session) -> W | UnixChannel | None:
        """Where frames of that session go; None if nobody knows."""

    def ran_at(self, peer: Peer, session: Session, now: float) -> float | None:
        """When a peer's process was last seen to run, whether it speaks or not; None if unseen."""
        way = self._way_to(peer, session)
        if isinstance(way, UnixChannel):
            return now if way.peer_runs else None
        return None if way is None else self._answered_at(way, now)

    @abstractmethod
    def _answered_at(self, way: W, now: float) -> float | None:
        """Since when at the latest a connection's other end has answered ZeroMQ's heartbeats."""

    @abstractmethod
    def _send(self, way: W, messages: Iterable[bytes]) -> None:
        """Not on a line of this host."""

    @abstractmethod
    def close(self) -> None:
        """Say nothing more."""

    def let_out(self) -> None:
        """In the middle of a turn: send what waits, unless something has just been sent."""
        if self._num_waiting and time.monotonic() >= self._flushed + MOST_S:
            self.flush()

    def flush(self) -> None:
        """Send what this turn had to say."""
        if self._num_waiting:
            self._num_waiting = 0
            self._flushed = time.monotonic()
            outboxes, self._outboxes = self._outboxes, {}
            for way, frames in outboxes.items():
                messages = bundle(frames)
                if isinstance(way, UnixChannel):
                    self._lines.send(way, messages)
                else:
                    self._send(way, messages)

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Have a frame sent at the end of this turn, or before. It may be lost."""
        try:
            self._put(peer, envelope)
            self._num_waiting += 1
            if self._num_waiting >= MOST_WAITING:
                self.flush()
        except KvferryError as error:
            # A frame that can't be made concerns one room, and fails that room alone.
            log.warning("unsendable endpoint=%s peer=%s error=%s", self._me, peer, error)
            self._observer.refused("unsendable")
            if isinstance(envelope.body, RoomMessage):
                room: Room = envelope.body.room
                self._answer(Cancel(room))

    def _put(self, peer: Peer, envelope: Envelope) -> None:
        way = self._way_to(peer, envelope.session)
        if way is None:
            return
        frame = encode(envelope)
        frames = self._outboxes.get(way)
        if frames is None:
            frames = self._outboxes[way] = []
        frames.append(frame)
        self._observer.frame_out(peer, envelope)

    def _opened(self, message: bytes) -> list[bytes]:
        frames = unbundle(message)
        if frames is None:
            self._observer.refused("frame-foreign")
        return frames or []

    def _events(self, frames: list[bytes]) -> Iterator[tuple[Session, Event]]:
        """What frames mean, and in which session each was said."""
        for decoded in [decode(frame) for frame in frames]:
            event = frame_event(decoded)
            if isinstance(decoded, BadFrame):
                self._observer.refused(f"frame-{decoded.fault}")
                if decoded.fault is not FrameFault.VERSION or decoded.header is None:
                    continue
                session = decoded.header.session
            else:
                session = decoded.session
                self._observer.frame_in(decoded)
            assert event is not None
            yield session, event


class SourceChannel(Channel[bytes]):
    """A source's: a bound socket and, for this host, a listener; spoken to by many targets."""

    def __init__(
        self,
        me: Peer,
        poller: Poller,
        observer: Observer,
        answer: Callable[[Event], None],
        server: ControlServer,
        local: UnixServer | None = None,
    ) -> None:
        super().__init__(me, poller, observer, answer)
        self._server = server
        self._local = local
        self._routes: dict[Session, bytes | UnixChannel] = {}
        # Ways that took nothing when they were last tried.
        self._dead: set[bytes] = set()
        for one in server.sockets:
            poller.watch(one)
        if local is not None:
            poller.watch(local.fileno())

    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """Frames, and the routes along which they would be answered."""
        for line, heard in self._lines.receive(ready):
            yield from self._routed(line, heard)
            if line.over:
                self._lines.drop(line)
                yield Dropped(None)
        if self._local is not None and self._local.fileno() in ready:
            for line in self._local.accept():
                self._lines.add(line)
            self._lines.sweep()
        server = self._server
        if not any(one in ready for one in server.sockets):
            return
        for route, message in server.receive(ready):
            yield from self._routed(route, self._opened(message))
        if refused := server.counts.pop("refused", 0):
            self._observer.refused("connection", refused)
        if server.counts.pop("dropped", 0):
            yield Dropped(None)

    def _routed(self, route: bytes | UnixChannel, frames: list[bytes]) -> Iterator[Event]:
        for session, event in self._events(frames):
            self._routes[session.greeting] = route
            yield event

    def _way_to(self, peer: Peer, session: Session) -> bytes | UnixChannel | None:
        """Along which that session was last heard."""
        return self._routes.get(session.greeting)

    def _answered_at(self, way: bytes, now: float) -> float | None:
        """Our own heartbeats find a way that does not stand any more."""
        return None if way in self._dead else now - self._server.lag_s

    def _send(self, way: bytes, messages: Iterable[bytes]) -> None:
        for message in messages:
            if self._server.send(way, message):
                self._dead.discard(way)
            else:
                self._dead.add(way)
        self._poller.used(self._server.socket)

    def keep(self, sessions: Iterable[Session]) -> None:
        """Forget the routes of all other sessions."""
        known = {session.greeting for session in sessions}
        self._routes = {s: route for s, route in self._routes.items() if s in known}
        self._dead &= set(self._routes.values())

    def close(self) -> None:
        """Close the socket and the listener."""
        self._lines.close()
        if self._local is not None:
            self._poller.unwatch(self._local.fileno())
            self._local.close()
        for one in self._server.sockets:
            self._poller.unwatch(one)
        self._server.close()


class TargetChannel(Channel[ControlClient]):
    """A target's: a connection to each source, and lines to those on this host.

    ``address_of`` knows where a source is, if anybody.
    """

    def __init__(
        self,
        me: Peer,
        poller: Poller,
        observer: Observer,
        answer: Callable[[Event], None],
        key: ClusterKey | None,
        address_of: Callable[[Peer], str | None],
        silence_s: float = SILENCE_S,
    ) -> None:
        super().__init__(me, poller, observer, answer)
        self._key = key
        self._silence_s = silence_s
        self._address_of = address_of
        self._context = new_context()
        self._clients: dict[Peer, tuple[str, ControlClient]] = {}
        self._by_socket: dict[ZmqSocket, Peer] = {}
        self._line_to: dict[Peer, UnixChannel] = {}

    @property
    def peers(self) -> set[Peer]:
        """To whom there is a connection."""
        return set(self._clients)

    def receive(self, ready: Collection[object]) -> Iterator[Event | Dropped]:
        """Frames, and what became of connections."""
        for line, heard in self._lines.receive(ready):
            yield from (event for _, event in self._events(heard))
            if line.over:
                yield from map(Dropped, self._hang_up(line))
        peers = {self._by_socket[one] for one in ready if one in self._by_socket}
        for peer in peers:
            _, client = self._clients[peer]
            for message in client.receive(ready):
                for _, event in self._events(self._opened(message)):
                    yield event
            if client.counts.pop("dropped", 0):
                yield Dropped(peer)
            if client.counts["refused"] >= SHUT_AFTER:
                client.counts.clear()
                yield ConnectRefused(peer, f"{peer} has another cluster key; give both the same")

    def join(self, peer: Peer, listener: UnixListener) -> None:
        """Talk to a source on a line of its own from now on, if it is on this host."""
        line = connect(listener)
        if line is None:
            return
        former = self._line_to.get(peer)
        if former is not None:
            self._hang_up(former)
        self._lines.add(line)
        if not line.over:
            self._line_to[peer] = line

    def _hang_up(self, line: UnixChannel) -> list[Peer]:
        """Whom the line led to. They are talked to as all others are."""
        led_to = [peer for peer, one in self._line_to.items() if one is line]
        for peer in led_to:
            del self._line_to[peer]
        self._outboxes.pop(line, None)
        self._lines.drop(line)
        return led_to

    def _way_to(self, peer: Peer, session: Session) -> ControlClient | UnixChannel | None:
        """A line if there is one; a connection stands behind it."""
        client = self._client_for(peer)
        return None if client is None else self._line_to.get(peer, client)

    def _answered_at(self, way: ControlClient, now: float) -> float | None:
        return now - way.lag_s if way.num_standing else None

    def _send(self, way: ControlClient, messages: Iterable[bytes]) -> None:
        for message in messages:
            way.send(message)
        self._poller.used(way.socket)

    def _client_for(self, peer: Peer) -> ControlClient | None:
        address, known = self._address_of(peer), self._clients.get(peer)
        if address is None or (known and known[0] == address):
            return known[1] if known else None
        if known:
            self.drop(peer)
        client = ControlClient(address, self._key, self._context, self._silence_s)
        self._clients[peer] = address, client
        for one in client.sockets:
            self._poller.watch(one)
            self._by_socket[one] = peer
        return client

    def drop(self, peer: Peer) -> None:
        """Nobody there is needed any more."""
        _, client = self._clients.pop(peer)
        self._outboxes.pop(client, None)
        if peer in self._line_to:
            self._hang_up(self._line_to[peer])
        for one in client.sockets:
            self._poller.unwatch(one)
            del self._by_socket[one]
        client.close(0)

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self._clients):
            self.drop(peer)
        self._context.destroy(LINGER_MS)
