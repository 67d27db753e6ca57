"""Channels: send the frames of a runner and receive those of its peers.

A source answers along the route of a target's latest frame. A target has a ZeroMQ connection to
each source, at the address in the source's latest instance view. To a source on the same host it
also has a Unix channel, and prefers it while it is open.

The frames of one turn to one peer leave in one message. In a long turn, the first frames leave
earlier, so that an idle peer can start.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
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
from kvferry.endpoint.runner.runner import frame_event
from kvferry.errors import KvferryError
from kvferry.ids import Peer, Room, Session
from kvferry.protocol.codec import MAX_FRAME_BYTES, BadFrame, decode, encode
from kvferry.protocol.events import Cancel, ConnectRefused, Event, Received, WrongVersion
from kvferry.protocol.messages import Envelope, RoomMessage
from kvferry.security.keys import ClusterKey
from kvferry.telemetry.observer import Observer

log = logging.getLogger("kvferry.endpoint")

# Failed handshakes after which a source counts as unreachable. One may fail during a restart; with
# a wrong key all do.
MAX_REFUSED = 3
# Frames are sent before the end of a turn once so many wait, or once one waits for so long.
MAX_WAITING = 8
MAX_WAIT_S = 100e-6
# Limit for Unix channels. More peers of this host use the ZeroMQ control channel.
MAX_CHANNELS = 256
# Limit for the bytes of incomplete frames of all channels together.
MAX_UNFINISHED_BYTES = 4 * MAX_FRAME_BYTES

R = TypeVar("R")


class ConnectionLost(NamedTuple):
    """Connections to ``peer`` have ended, or to an unknown peer. A hint of a death, not proof."""

    peer: Peer | None


@dataclass(eq=False)
class UnixChannels:
    """Polls Unix channels and bounds their number and the memory of incomplete frames.

    The bounds hold against an authenticated peer that misbehaves. The protocol repeats frames that
    a closed channel loses.
    """

    poller: Poller
    observer: Observer
    _channels: dict[object, UnixChannel] = field(default_factory=dict)
    # Channels with queued bytes, which wait to become writable.
    _full: set[UnixChannel] = field(default_factory=set)
    _unfinished: dict[UnixChannel, int] = field(default_factory=dict)

    def add(self, channel: UnixChannel) -> None:
        """Watch a channel, or close it if there are too many."""
        if len(self._channels) >= MAX_CHANNELS:
            self.observer.refused("too-many-lines")
            channel.close()
            return
        self._channels[channel.fileno()] = channel
        self.poller.watch(channel.fileno())

    def receive(self, ready: Iterable[object]) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """Return the frames of ready channels; also channels that are over, without frames."""
        for channel in [self._channels[one] for one in ready if one in self._channels]:
            if channel in self._full:
                channel.resume()
                self._update_writable(channel)
            yield channel, channel.receive()
            yield from self._enforce_limit(channel)

    def _enforce_limit(self, channel: UnixChannel) -> Iterator[tuple[UnixChannel, list[bytes]]]:
        """End the channels with the longest incomplete frames until the rest is within bounds."""
        self._unfinished.pop(channel, None)
        if channel.num_unfinished and not channel.over:
            self._unfinished[channel] = channel.num_unfinished
        while sum(self._unfinished.values()) > MAX_UNFINISHED_BYTES:
            longest = max(self._unfinished, key=lambda one: self._unfinished[one])
            del self._unfinished[longest]
            longest.over = True
            self.observer.refused("unfinished-frames")
            yield longest, []

    def send(self, channel: UnixChannel, messages: Iterable[bytes]) -> None:
        """Send messages, now or when there is room."""
        for message in messages:
            channel.send(message)
        if channel.has_unsent:
            self._update_writable(channel)

    def _update_writable(self, channel: UnixChannel) -> None:
        if channel.has_unsent != (channel in self._full) and channel.fileno() in self._channels:
            self._full ^= {channel}
            self.poller.watch_writable(channel.fileno(), wanted=channel.has_unsent)

    def drop(self, channel: UnixChannel) -> None:
        """Close a channel."""
        if self._channels.pop(channel.fileno(), None) is not None:
            self.poller.unwatch(channel.fileno())
        self._full.discard(channel)
        self._unfinished.pop(channel, None)
        channel.close()

    def drop_ended(self) -> None:
        """Close the channels that are over."""
        for channel in [channel for channel in self._channels.values() if channel.over]:
            self.drop(channel)

    def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            self.drop(channel)


@dataclass(eq=False)
class Channel(ABC, Generic[R]):
    """Common part of both channels. ``R`` is the type of a ZeroMQ route to a peer.

    ``answer`` gets the event that fails a room whose frame cannot be sent.
    """

    me: Peer
    poller: Poller
    observer: Observer
    answer: Callable[[Event], None]

    def __post_init__(self) -> None:
        self._unix_channels = UnixChannels(self.poller, self.observer)
        # Encoded frames that wait to be sent.
        self._outboxes: dict[R | UnixChannel, list[bytes]] = {}
        self._num_waiting = 0
        self._flushed_at = 0.0

    @abstractmethod
    def receive(self, ready: Collection[object]) -> Iterator[Event | ConnectionLost]:
        """Return what has arrived at the ready sockets."""

    @abstractmethod
    def _route_to(self, peer: Peer, session: Session) -> R | UnixChannel | None:
        """Return where frames of a session go; None if that is unknown."""

    def last_ran_at(self, peer: Peer, session: Session, now: float) -> float | None:
        """Return when a peer's process was last known to run, silent or not; None if unknown."""
        route = self._route_to(peer, session)
        if isinstance(route, UnixChannel):
            return now if route.peer_runs else None
        return None if route is None else self._last_answered_at(route, now)

    @abstractmethod
    def _last_answered_at(self, route: R, now: float) -> float | None:
        """Return when the other end last answered ZeroMQ's heartbeats, at the earliest."""

    @abstractmethod
    def _send(self, route: R, messages: Iterable[bytes]) -> None:
        """Send messages over ZeroMQ."""

    @abstractmethod
    def close(self) -> None:
        """Close all sockets."""

    def flush_if_due(self) -> None:
        """Send waiting frames in the middle of a turn, unless frames have just been sent."""
        if self._num_waiting and time.monotonic() >= self._flushed_at + MAX_WAIT_S:
            self.flush()

    def flush(self) -> None:
        """Send all waiting frames."""
        if self._num_waiting:
            self._num_waiting = 0
            self._flushed_at = time.monotonic()
            outboxes, self._outboxes = self._outboxes, {}
            for route, frames in outboxes.items():
                messages = bundle(frames)
                if isinstance(route, UnixChannel):
                    self._unix_channels.send(route, messages)
                else:
                    self._send(route, messages)

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """Queue a frame, which is sent at the end of this turn or before. It may be lost."""
        try:
            route = self._route_to(peer, envelope.session)
            if route is not None:
                frame = encode(envelope)
                self._outboxes.setdefault(route, []).append(frame)
                self._num_waiting += 1
                self.observer.frame_out(peer, envelope)
        except KvferryError as error:
            # A frame that cannot be encoded fails its own room only.
            log.warning("unsendable endpoint=%s peer=%s error=%s", self.me, peer, error)
            self.observer.refused("unsendable")
            if isinstance(envelope.body, RoomMessage):
                room: Room = envelope.body.room
                self.answer(Cancel(room))
        if self._num_waiting >= MAX_WAITING:
            self.flush()

    def _unbundle(self, message: bytes) -> list[bytes]:
        frames = unbundle(message)
        if frames is None:
            self.observer.refused("frame-foreign")
        return frames or []

    def _events(self, frames: list[bytes]) -> Iterator[Received | WrongVersion]:
        """Decode frames, and yield their events."""
        for decoded in [decode(frame) for frame in frames]:
            if isinstance(decoded, BadFrame):
                self.observer.refused(f"frame-{decoded.fault}")
            else:
                self.observer.frame_in(decoded)
            event = frame_event(decoded)
            if event is not None:
                yield event


@dataclass(eq=False)
class SourceChannel(Channel[bytes]):
    """Channel of a source: a bound ZeroMQ socket and, for targets of this host, a Unix socket."""

    server: ControlServer
    unix_server: UnixServer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._routes: dict[Session, bytes | UnixChannel] = {}
        # Routes whose last send failed.
        self._dead: set[bytes] = set()
        for one in self.server.sockets:
            self.poller.watch(one)
        if self.unix_server is not None:
            self.poller.watch(self.unix_server.fileno())

    def receive(self, ready: Collection[object]) -> Iterator[Event | ConnectionLost]:
        """Return what has arrived at the ready sockets, and store the route of each frame."""
        for channel, frames in self._unix_channels.receive(ready):
            yield from self._routed(channel, frames)
            if channel.over:
                self._unix_channels.drop(channel)
                yield ConnectionLost(None)
        if self.unix_server is not None and self.unix_server.fileno() in ready:
            for channel in self.unix_server.accept():
                self._unix_channels.add(channel)
            self._unix_channels.drop_ended()
        server = self.server
        if not any(one in ready for one in server.sockets):
            return
        for route, message in server.receive(ready):
            yield from self._routed(route, self._unbundle(message))
        if refused := server.counts.pop("refused", 0):
            self.observer.refused("connection", refused)
        if server.counts.pop("dropped", 0):
            yield ConnectionLost(None)

    def _routed(self, route: bytes | UnixChannel, frames: list[bytes]) -> Iterator[Event]:
        for event in self._events(frames):
            self._routes[event.session.greeting] = route
            yield event

    def _route_to(self, peer: Peer, session: Session) -> bytes | UnixChannel | None:
        """Return the route of the session's latest frame."""
        return self._routes.get(session.greeting)

    def _last_answered_at(self, route: bytes, now: float) -> float | None:
        """Return None for a dead route. The protocol's heartbeats find those, by sending."""
        return None if route in self._dead else now - self.server.lag_s

    def _send(self, route: bytes, messages: Iterable[bytes]) -> None:
        for message in messages:
            if self.server.send(route, message):
                self._dead.discard(route)
            else:
                self._dead.add(route)
        self.poller.mark_used(self.server.socket)

    def keep_routes(self, sessions: Iterable[Session]) -> None:
        """Forget the routes of all other sessions."""
        known = {session.greeting for session in sessions}
        self._routes = {s: route for s, route in self._routes.items() if s in known}
        self._dead &= set(self._routes.values())

    def close(self) -> None:
        """Close all sockets."""
        self._unix_channels.close()
        if self.unix_server is not None:
            self.unix_server.close()
        self.server.close()


@dataclass(eq=False)
class TargetChannel(Channel[ControlClient]):
    """Channel of a target: a connection to each source, and Unix channels to those of this host."""

    key: ClusterKey | None
    address_of: Callable[[Peer], str | None]
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self._context = new_context()
        self._clients: dict[Peer, tuple[str, ControlClient]] = {}
        self._by_socket: dict[ZmqSocket, Peer] = {}
        self._unix_channel_of: dict[Peer, UnixChannel] = {}

    @property
    def peers(self) -> set[Peer]:
        """Sources with a connection."""
        return set(self._clients)

    def receive(self, ready: Collection[object]) -> Iterator[Event | ConnectionLost]:
        """Return what has arrived at the ready sockets."""
        for channel, frames in self._unix_channels.receive(ready):
            yield from self._events(frames)
            if channel.over:
                yield from map(ConnectionLost, self._drop_unix(channel))
        peers = {self._by_socket[one] for one in ready if one in self._by_socket}
        for peer in peers:
            _, client = self._clients[peer]
            for message in client.receive(ready):
                yield from self._events(self._unbundle(message))
            if client.counts.pop("dropped", 0):
                yield ConnectionLost(peer)
            if client.counts["refused"] >= MAX_REFUSED:
                client.counts.clear()
                yield ConnectRefused(peer, f"{peer} has another cluster key; give both the same")

    def connect_unix(self, peer: Peer, listener: UnixListener) -> None:
        """Use a Unix channel to a source from now on, if it is on this host."""
        channel = connect(listener)
        if channel is None:
            return
        former = self._unix_channel_of.get(peer)
        if former is not None:
            self._drop_unix(former)
        self._unix_channels.add(channel)
        if not channel.over:
            self._unix_channel_of[peer] = channel

    def _drop_unix(self, channel: UnixChannel) -> list[Peer]:
        """Close a Unix channel. Return its peers, which use their connection from now on."""
        peers = [peer for peer, one in self._unix_channel_of.items() if one is channel]
        for peer in peers:
            del self._unix_channel_of[peer]
        self._outboxes.pop(channel, None)
        self._unix_channels.drop(channel)
        return peers

    def _route_to(self, peer: Peer, session: Session) -> ControlClient | UnixChannel | None:
        """Return the Unix channel if there is one, or else the connection."""
        client = self._client_for(peer)
        return None if client is None else self._unix_channel_of.get(peer, client)

    def _last_answered_at(self, route: ControlClient, now: float) -> float | None:
        return now - route.lag_s if route.num_open else None

    def _send(self, route: ControlClient, messages: Iterable[bytes]) -> None:
        for message in messages:
            route.send(message)
        self.poller.mark_used(route.socket)

    def _client_for(self, peer: Peer) -> ControlClient | None:
        """Return the connection to a source, made or replaced if its address is new."""
        address, known = self.address_of(peer), self._clients.get(peer)
        if address is None or (known and known[0] == address):
            return known[1] if known else None
        if known:
            self.drop(peer)
        client = ControlClient(address, self.key, self._context, self.silence_s)
        self._clients[peer] = address, client
        for one in client.sockets:
            self.poller.watch(one)
            self._by_socket[one] = peer
        return client

    def drop(self, peer: Peer) -> None:
        """Close the connection to a source."""
        _, client = self._clients.pop(peer)
        self._outboxes.pop(client, None)
        if peer in self._unix_channel_of:
            self._drop_unix(self._unix_channel_of[peer])
        for one in client.sockets:
            self.poller.unwatch(one)
            del self._by_socket[one]
        client.close(0)

    def close(self) -> None:
        """Close all sockets."""
        for peer in list(self._clients):
            self.drop(peer)
        self._context.destroy(LINGER_MS)
