"""The control channel: frames between a target and its sources, over ZeroMQ.

A source binds a ``ControlServer``; a target connects one ``ControlClient`` to
each of its sources. With a cluster key both sides prove that they have it (CURVE)
before a frame of theirs is seen. Frames may be lost, and the protocol repeats
what matters, so nothing here waits: what can't be sent now is counted and dropped.

A channel belongs to one thread, the endpoint's owner, which polls ``sockets``
for input and calls ``receive`` when any of them has some. There is no thread of
our own: the questions of ZeroMQ's security layer (ZAP) and its news of
connections are taken inside ``receive``.

This module knows frames as bytes. It does not know what they mean.
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

# What one call of ``receive`` takes at most, so that the owner gets to its other work.
MAX_BATCH = 256
MAX_BATCH_BYTES = 64 << 20
MAX_QUEUED = 1024
# CURVE and bundles wrap a frame in a few bytes more.
WRAPPING_BYTES = 128
LINGER_MS = 200
HANDSHAKE_MS = 10_000
# During a network partition the kernel repeats lost packets ever more rarely: after 30 s it waits
# for 20 s more. So a connection is given up before that, and connecting is tried again often.
UNACKNOWLEDGED_MS = 4_000
CONNECT_MS = 1_000
# Three sockets a client; the default of about a thousand is too few for many sources.
MAX_SOCKETS = 1 << 14

SILENCE_S = LivenessConfig().silence_s

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Addresses come from other machines, and ZeroMQ knows stranger ways to connect than TCP.
ADDRESS = re.compile(
    r"tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})", re.ASCII
)
WATCHED = FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_numbers = itertools.count()


def new_context() -> ZmqContext:
    """A context for one endpoint's channels. ``destroy`` it with ``linger=LINGER_MS``."""
    context: ZmqContext = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class _Channel:
    """What a server and a client have in common.

    ``counts`` has ``refused`` (connections whose handshake failed: another key,
    or not ZeroMQ at all), ``dropped`` (connections that ended: a sign that a peer
    may be gone, and no proof), ``unsent`` and ``malformed``.

    ZeroMQ's own threads exchange heartbeats, without Python and its GIL, and end a connection
    whose other end does not answer them. So the process at a connection that stands has run
    within the last ``lag_s``.
    """

    def __init__(self, context: ZmqContext, kind: int, silence_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self.num_standing = 0
        self.socket: ZmqSocket = context.socket(kind)
        ask_s, patience_s = silence_s / 8, silence_s / 2
        self.lag_s = ask_s + patience_s
        _configure(self.socket, ask_s, patience_s)
        self._monitor = _monitor(context, self.socket)

    @property
    def sockets(self) -> tuple[ZmqSocket, ...]:
        """What to poll for input."""
        return (self.socket, self._monitor)

    def _drain(self, ready: Container[object] | None) -> list[list[bytes]]:
        """The messages that are there, up to a limit, and the news of connections."""
        if ready is None or self._monitor in ready:
            self._count_news()
        messages: list[list[bytes]] = []
        if ready is not None and self.socket not in ready:
            return messages
        num_bytes = 0
        while len(messages) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES:
            message = _take(self.socket)
            if message is None:
                break
            messages.append(message)
            num_bytes += sum(map(len, message))
        return messages

    def _count_news(self) -> None:
        for _ in range(MAX_BATCH):
            message = _take(self._monitor)
            if message is None:
                return
            event = parse_monitor_message(message)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.num_standing += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self.num_standing = max(0, self.num_standing - 1)
                self.counts["dropped"] += 1
            else:
                self.counts["refused"] += 1

    def _send(self, *parts: bytes) -> bool:
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


class ControlServer(_Channel):
    """A source's end: bound for its whole life, spoken to by many targets.

    A ``route`` names a connection. It dies with the connection, and a target that
    reconnects has another; the route of a peer is the one of its latest frame.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        key: ClusterKey | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        bound_to = checked_bind_address(host, port, key)
        self._key = key
        self._context = new_context()
        try:
            # The guard stands before the listener opens: without one, ZeroMQ lets everybody in.
            self._zap: ZmqSocket = self._context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            super().__init__(self._context, zmq.ROUTER, silence_s)
            self._listen(bound_to, port)
        except BaseException:
            self._context.destroy(0)
            raise

    def _listen(self, host: str, port: int) -> None:
        self.socket.router_mandatory = True
        # Set also without a key, because then ZeroMQ refuses peers of its first version,
        # for which any bytes are a message.
        self.socket.zap_domain = ZAP_DOMAIN
        if self._key is not None:
            self.socket.curve_server = True
            self.socket.curve_secretkey = self._key.server.secret
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
        """What to poll for input."""
        return (*super().sockets, self._zap)

    def receive(self, ready: Container[object] | None = None) -> list[tuple[bytes, bytes]]:
        """The frames that are there, each with its route. Never waits.

        ``ready`` are those of the sockets that have something, where that is known.
        """
        if ready is None or self._zap in ready:
            self._judge()
        frames = []
        for message in self._drain(ready):
            if len(message) == 2:
                frames.append((message[0], message[1]))
            else:
                self.counts["malformed"] += 1
        return frames

    def send(self, route: bytes, frame: bytes) -> bool:
        """Send if it can be sent now. A route that is gone or full takes nothing."""
        return self._send(route, frame)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Stop listening; what was just sent has a moment to leave. Idempotent."""
        if not self._context.closed:
            self._close(linger_ms)
            self._context.destroy(linger_ms)

    def _judge(self) -> None:
        """Answer ZeroMQ's questions whether a connection may go on (RFC 27)."""
        for _ in range(MAX_BATCH):
            request = _take(self._zap)
            if request is None:
                return
            if len(request) < 6:
                # Only this process can ask, so this is for a future version's questions.
                self._zap.send_multipart([b"1.0", b"", b"500", b"malformed", b"", b""])
                continue
            version, asked, _domain, _address, _identity, mechanism, *proof = request
            may = self._may_enter(mechanism, proof)
            verdict = [b"200", b"OK"] if may else [b"400", b"not the key of this cluster"]
            self._zap.send_multipart([version, asked, *verdict, b"", b""])

    def _may_enter(self, mechanism: bytes, proof: list[bytes]) -> bool:
        if self._key is None:
            return mechanism == b"NULL"
        if mechanism != b"CURVE" or len(proof) != 1 or len(proof[0]) != 32:
            return False
        return hmac.compare_digest(z85.encode(proof[0]), self._key.client.public)


class ControlClient(_Channel):
    """A target's end of the channel to one source. Reconnects by itself for as long as it lives.

    Frames sent before the connection stands wait for it, up to a limit: a first
    greeting must not be lost to the time that connecting takes. The channels of
    one endpoint share its ``context``; without one, a client has its own.
    """

    def __init__(
        self,
        address: str,
        key: ClusterKey | None = None,
        context: ZmqContext | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        made = new_context() if context is None else context
        self._own = made if context is None else None
        super().__init__(made, zmq.DEALER, silence_s)
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
            raise _no_address(address)
        self.socket.ipv6 = "[" in address
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            raise _no_address(address) from None

    def receive(self, ready: Container[object] | None = None) -> list[bytes]:
        """The frames that are there. Never waits. ``ready`` is as for a server."""
        frames = []
        for message in self._drain(ready):
            if len(message) == 1:
                frames.append(message[0])
            else:
                self.counts["malformed"] += 1
        return frames

    def send(self, frame: bytes) -> bool:
        """Send, or queue until the connection stands. A full queue takes nothing."""
        return self._send(frame)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Disconnect; what was just sent has a moment to leave. Idempotent."""
        self._close(linger_ms)
        if self._own is not None:
            self._own.destroy(linger_ms)


def _configure(channel: ZmqSocket, ask_s: float, patience_s: float) -> None:
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
        zmq.HEARTBEAT_IVL: int(1000 * ask_s),
        zmq.HEARTBEAT_TIMEOUT: int(1000 * patience_s),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
    }
    for option, value in options.items():
        channel.set(option, value)


def _monitor(context: ZmqContext, watched: ZmqSocket) -> ZmqSocket:
    """A socket that has a message for each failed handshake and each connection that ended."""
    address = f"inproc://kvferry-monitor-{next(_numbers)}"
    watched.monitor(address, WATCHED)
    listener: ZmqSocket = context.socket(zmq.PAIR)
    # Without a limit: ZeroMQ would wait for a full one inside its own thread, and closing
    # would wait for that thread.
    listener.rcvhwm = 0
    listener.connect(address)
    return listener


def has_message(source: ZmqSocket) -> bool:
    """Whether something can be received from a socket."""
    events = source.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def _take(source: ZmqSocket) -> list[bytes] | None:
    """One message, or None. Of a message with too many parts, only the first few are kept."""
    # Asking first: an exception for every empty socket costs more than the messages do.
    if not has_message(source):
        return None
    parts: list[bytes] = [source.recv(zmq.DONTWAIT)]
    while source.rcvmore:
        part: Any = source.recv(zmq.DONTWAIT)
        if len(parts) < 16:
            parts.append(part)
    return parts


def _no_address(text: str) -> InputError:
    return InputError(
        f"cannot connect to {text!r:.200}; a control address is such as tcp://10.0.0.1:5000"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
