"""The control channel: frames between a target and its sources, over ZeroMQ.

A source binds a ``ControlServer``; a target connects one ``ControlClient`` to each of its
sources. With a cluster key, both sides authenticate (CURVE) before either sees a frame. Frames
may be lost and the protocol repeats what matters, so nothing here blocks: a frame that cannot be
sent now is counted and dropped.

The loop thread owns a channel. It polls ``sockets`` and calls ``receive`` when one of them is
readable. ``receive`` also answers ZeroMQ's authentication requests (ZAP) and reads its connection
events. This module treats frames as opaque bytes.
"""

from __future__ import annotations

import hmac
import itertools
import re
from collections import Counter
from collections.abc import Container
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvferry.config import LivenessConfig
from kvferry.errors import InputError
from kvferry.protocol.codec import MAX_FRAME_BYTES
from kvferry.security.keys import ClusterKey, checked_bind_address

ZmqContext = zmq.Context[zmq.Socket[bytes]]
ZmqSocket = zmq.Socket[bytes]

# Limits of one ``receive`` call, so that the loop gets to its other work.
MAX_BATCH = 256
MAX_BATCH_BYTES = 64 << 20
MAX_QUEUED = 1024
# Room for what CURVE and bundles add to a frame.
WRAPPING_BYTES = 128
LINGER_MS = 200
HANDSHAKE_MS = 10_000
# In a network partition the kernel's retransmission interval doubles, up to tens of seconds. End
# the connection before that and reconnect at short intervals.
UNACKNOWLEDGED_MS = 4_000
CONNECT_MS = 1_000
# After a source's start, all its targets may connect at once. A connection that does not fit the
# kernel's queue is tried again a second later.
BACKLOG = 4096
# A client takes three sockets, so ZeroMQ's default of 1,023 limits the number of sources.
MAX_SOCKETS = 1 << 14

SILENCE_S = LivenessConfig().silence_s

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Addresses come from peers. Allow no ZeroMQ transport but TCP.
ADDRESS = re.compile(
    r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})", re.ASCII
)
WATCHED = FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_numbers = itertools.count()


def new_context() -> ZmqContext:
    """Return a context for an endpoint's channels. ``destroy`` it with ``linger=LINGER_MS``."""
    context: ZmqContext = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class _ControlSocket:
    """A ZeroMQ socket with its monitor: the common part of server and client.

    ``counts`` has ``refused`` (failed handshakes: another key, or not ZeroMQ), ``dropped``
    (connections that ended, which hints that a peer may be dead), ``unsent`` and ``malformed``.

    ZeroMQ's own threads exchange heartbeats without Python's GIL, and end a connection whose
    other end does not answer. So while a connection is open, the process at its other end has run
    within the last ``lag_s`` seconds.
    """

    def __init__(self, context: ZmqContext, kind: int, silence_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self.num_open = 0
        self.socket: ZmqSocket = context.socket(kind)
        interval_s, timeout_s = silence_s / 8, silence_s / 2
        self.lag_s = interval_s + timeout_s
        _configure(self.socket, interval_s, timeout_s)
        self._monitor = _monitor(context, self.socket)

    @property
    def sockets(self) -> tuple[ZmqSocket, ...]:
        """Sockets to poll for input."""
        return (self.socket, self._monitor)

    def _drain(self, ready: Container[object] | None, num_parts: int) -> list[list[bytes]]:
        """Return waiting messages of so many parts, up to a limit; count other events."""
        if ready is None or self._monitor in ready:
            self._count_connections()
        messages: list[list[bytes]] = []
        if ready is not None and self.socket not in ready:
            return messages
        num_bytes = 0
        for _ in range(MAX_BATCH):
            message = _next_message(self.socket) if num_bytes < MAX_BATCH_BYTES else None
            if message is None:
                break
            num_bytes += sum(map(len, message))
            if len(message) == num_parts:
                messages.append(message)
            else:
                self.counts["malformed"] += 1
        return messages

    def _count_connections(self) -> None:
        for _ in range(MAX_BATCH):
            message = _next_message(self._monitor)
            if message is None:
                return
            event = parse_monitor_message(message)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_open += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self.num_open = max(0, self.num_open - 1)
                self.counts["dropped"] += 1
            else:
                self.counts["refused"] += 1

    def send(self, *parts: bytes) -> bool:
        """Send a frame now, or queue it until connected. A server's frame follows its route.

        Return False if the route is gone or the queue is full.
        """
        try:
            self.socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.counts["unsent"] += 1
            return False
        return True

    def _close(self, linger_ms: int) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close(linger_ms)


class ControlServer(_ControlSocket):
    """A source's end: bound for the endpoint's whole life, with many targets connected.

    A ``route`` identifies a connection. A target that reconnects has a new route, so the valid
    route of a peer is that of its latest frame.
    """

    def __init__(
        self, host: str, port: int = 0, key: ClusterKey | None = None, silence_s: float = SILENCE_S
    ) -> None:
        bound_to = checked_bind_address(host, port, key)
        self._key = key
        self._context = new_context()
        try:
            # Bind the authenticator before the listener: without one, ZeroMQ admits everybody.
            self._zap: ZmqSocket = self._context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            super().__init__(self._context, zmq.ROUTER, silence_s)
            self._listen(bound_to, port)
        except BaseException:
            self._context.destroy(0)
            raise

    def _listen(self, host: str, port: int) -> None:
        self.socket.router_mandatory = True
        # Set it even without a key: ZeroMQ then refuses peers of protocol version 1, which would
        # take any bytes for a message.
        self.socket.zap_domain = ZAP_DOMAIN
        if self._key is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey = self._key.server.secret
        self.socket.backlog = BACKLOG
        self.socket.ipv6 = ":" in host
        try:
            self.socket.bind(f"tcp://{_bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            raise InputError(
                f"cannot listen on {host} port {port}: {zmq.strerror(error.errno or 0)}; "
                f"choose another address or port, or port 0 for any"
            ) from None
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = f"tcp://{_bracketed(host)}:{self.port}"

    @property
    def sockets(self) -> tuple[ZmqSocket, ...]:
        """Sockets to poll for input."""
        return (*super().sockets, self._zap)

    def receive(self, ready: Container[object] | None = None) -> list[tuple[bytes, bytes]]:
        """Return waiting frames with their routes. ``ready``: readable ``sockets``; None: all."""
        if ready is None or self._zap in ready:
            self._authenticate()
        return [(route, frame) for route, frame in self._drain(ready, 2)]

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Stop listening. Frames just sent get ``linger_ms`` to leave. Idempotent."""
        if not self._context.closed:
            self._close(linger_ms)
            self._context.destroy(linger_ms)

    def _authenticate(self) -> None:
        """Answer ZeroMQ's authentication requests (RFC 27)."""
        for _ in range(MAX_BATCH):
            request = _next_message(self._zap)
            if request is None:
                return
            if len(request) < 6:
                # Only this process can send requests: one of a future protocol version.
                self._zap.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
                continue
            version, request_id, _domain, _address, _identity, mechanism, *proof = request
            allowed = self._is_allowed(mechanism, proof)
            verdict = [b"200", b"OK"] if allowed else [b"400", b"not the key of this cluster"]
            self._zap.send_multipart([version, request_id, *verdict, b"", b""])

    def _is_allowed(self, mechanism: bytes, proof: list[bytes]) -> bool:
        if self._key is None:
            return mechanism == b"NULL"
        if mechanism != b"CURVE" or len(proof) != 1 or len(proof[0]) != 32:
            return False
        return hmac.compare_digest(z85.encode(proof[0]), self._key.client.public)


class ControlClient(_ControlSocket):
    """A target's connection to one source. Reconnects by itself until it is closed.

    Frames sent before the connection is open are queued, up to a limit, so that a first Hello is
    not lost. The clients of one endpoint share its ``context``; None makes a new one.
    """

    def __init__(
        self,
        address: str,
        key: ClusterKey | None = None,
        context: ZmqContext | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        used = new_context() if context is None else context
        self._own_context = used if context is None else None
        super().__init__(used, zmq.DEALER, silence_s)
        try:
            self._connect(address, key)
        except BaseException:
            self.close(0)
            raise

    def _connect(self, address: str, key: ClusterKey | None) -> None:
        if key is not None:
            self.socket.curve_serverkey = key.server.public
            self.socket.curve_publickey = key.client.public
            self.socket.curve_secretkey = key.client.secret
        parts = ADDRESS.fullmatch(address)
        if parts is None or not 0 < int(parts[2]) < 1 << 16:
            raise _bad_address(address)
        self.socket.ipv6 = "[" in address
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            raise _bad_address(address) from None

    def receive(self, ready: Container[object] | None = None) -> list[bytes]:
        """Return the waiting frames. Never blocks. ``ready`` is as for a server."""
        return [frame for (frame,) in self._drain(ready, 1)]

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Disconnect. Frames just sent get ``linger_ms`` to leave. Idempotent."""
        self._close(linger_ms)
        if self._own_context is not None:
            self._own_context.destroy(linger_ms)


def _configure(channel: ZmqSocket, interval_s: float, timeout_s: float) -> None:
    options: dict[int, int] = {
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES + WRAPPING_BYTES,
        zmq.SNDHWM: MAX_QUEUED,
        zmq.RCVHWM: MAX_QUEUED,
        zmq.LINGER: LINGER_MS,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.RECONNECT_IVL: 10,
        zmq.RECONNECT_IVL_MAX: 500,
        zmq.CONNECT_TIMEOUT: CONNECT_MS,
        zmq.TCP_MAXRT: UNACKNOWLEDGED_MS,
        zmq.HEARTBEAT_IVL: int(1000 * interval_s),
        zmq.HEARTBEAT_TIMEOUT: int(1000 * timeout_s),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
    }
    for option, value in options.items():
        channel.set(option, value)


def _monitor(context: ZmqContext, watched: ZmqSocket) -> ZmqSocket:
    """Return a socket that receives the connection events of ``watched``."""
    address = f"inproc://kvferry-monitor-{next(_numbers)}"
    watched.monitor(address, WATCHED)
    listener: ZmqSocket = context.socket(zmq.PAIR)
    # Unlimited: ZeroMQ's thread would block on a full queue, and closing would wait for it.
    listener.rcvhwm = 0
    listener.connect(address)
    return listener


def has_message(source: ZmqSocket) -> bool:
    """Return whether a socket has a message to receive."""
    events = source.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _next_message(source: ZmqSocket) -> list[bytes] | None:
    """Receive one message, or None. Keeps at most the first 16 parts of a message."""
    # Check first: an exception for each empty socket would cost more than the messages.
    if not has_message(source):
        return None
    parts: list[bytes] = [source.recv(zmq.DONTWAIT)]
    while source.rcvmore:
        part: Any = source.recv(zmq.DONTWAIT)
        if len(parts) < 16:
            parts.append(part)
    return parts


def _bad_address(text: str) -> InputError:
    return InputError(f"cannot connect to {text!r:.200}; use an address like tcp://10.0.0.1:5000")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
