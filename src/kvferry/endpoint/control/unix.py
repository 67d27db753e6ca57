"""Unix-socket channels: frames between processes of one host and user, without ZeroMQ's threads.

A frame over ZeroMQ passes through a thread at each end, and waking these threads takes longer than
everything else. So a source also listens on a Unix socket, and sends its address (``UnixListener``)
to each target in the handshake, over the control channel: with a cluster key, only its holders
learn the address. A target on the same host and of the same user connects, and sends its frames
there from then on. When the Unix channel ends, both use the control channel again.

The stream is the listener's secret, then frames, each preceded by its length. Both ends check that
the other process runs as the same user. Names are in Linux's abstract namespace, so no file is left
behind.

For the loop thread. Nothing blocks: bytes that a peer has no room for are queued, up to a limit.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.endpoint.control.bundles import LENGTH, split
from kvferry.protocol.codec import MAX_FRAME_BYTES

SECRET_BYTES = 32
BACKLOG = 128
# Connections that have not sent the secret yet. Of more, the oldest is closed.
MAX_UNPROVEN = 64
# Limit of one read, so that the loop gets to its other work.
READ_BYTES = 256 << 10
# Bytes queued for a peer that does not read. Further frames are lost; the protocol repeats them.
MAX_UNSENT_BYTES = 32 << 20

# Linux process states: running or runnable, sleeping, in a device wait, idle.
RUNNING = ("R", "S", "D", "I")

_CREDENTIALS = struct.Struct("3i")


class UnixListener(msgspec.Struct, frozen=True, array_like=True):
    """Address of a source's Unix socket, and the secret that a connection must send first."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

    def __repr__(self) -> str:
        return f"<UnixListener {self.name}>"


class UnixChannel:
    """One connection. Once ``over`` is set, nothing more arrives and its user must close it."""

    def __init__(self, connected: socket.socket, secret: bytes = b"") -> None:
        connected.setblocking(False)
        self._socket = connected
        self._peer_pid, _ = _credentials(connected)
        self._secret = secret
        # An incomplete frame, and its length once that is known.
        self._in, self._expected_bytes = bytearray(), 0
        self._out = bytearray()
        self.over = False

    def fileno(self) -> int:
        """Return the file descriptor, for a poller."""
        return self._socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether the peer has sent the secret, or needs none."""
        return not self._secret

    @property
    def peer_runs(self) -> bool:
        """Whether the kernel says that the peer's process is not stopped. It may be starved."""
        return not self.over and process_state(self._peer_pid) in RUNNING

    @property
    def num_unfinished(self) -> int:
        """Number of bytes held of an incomplete frame."""
        return len(self._in)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are queued: call ``resume`` when the socket is writable."""
        return bool(self._out)

    def send(self, message: bytes) -> bool:
        """Send or queue a message. Return False, sending nothing, if the queue is full."""
        if self.over or len(self._out) + len(message) > MAX_UNSENT_BYTES:
            return False
        if self._out:
            self._out += message
        else:
            self._out += message[self._send(message) :]
        return not self.over

    def resume(self) -> None:
        """Send queued bytes."""
        if self._out:
            del self._out[: self._send(self._out)]

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.over = True
            return 0

    def receive(self) -> list[bytes]:
        """Return the complete frames that have arrived. Never blocks."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.over = True
            return []
        if self._in or not self.is_proven:
            self._in += data
            if not self._check_secret() or len(self._in) < self._expected_bytes:
                return []
            data = bytes(self._in)
        frames, at = split(data)
        self._keep(data[at:])
        return frames

    def _keep(self, rest: bytes) -> None:
        """Store an incomplete frame, which is parsed again only when all of it has arrived."""
        self._in, self._expected_bytes = bytearray(rest), 0
        if len(rest) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest)
            self._expected_bytes = LENGTH.size + length
            # Longer than any valid frame.
            self.over = length > MAX_FRAME_BYTES

    def _check_secret(self) -> bool:
        """Return whether the peer has sent the secret. A wrong one ends the connection."""
        if self._secret and len(self._in) >= len(self._secret):
            received = bytes(self._in[: len(self._secret)])
            if hmac.compare_digest(received, self._secret):
                del self._in[: len(received)]
                self._secret = b""
            else:
                self.over = True
        return self.is_proven

    def close(self) -> None:
        """Close the connection."""
        self.over = True
        self._socket.close()


class UnixServer:
    """A source's listening socket."""

    def __init__(self) -> None:
        self.listener = UnixListener(
            f"kvferry-{secrets.token_hex(16)}", secrets.token_bytes(SECRET_BYTES)
        )
        self._socket = _unix_socket()
        self._socket.bind(_address(self.listener))
        self._socket.listen(BACKLOG)
        self._unproven: dict[UnixChannel, None] = {}

    @staticmethod
    def open() -> UnixServer | None:
        """Return a listening server, or None where the system has no abstract Unix sockets."""
        if sys.platform != "linux":
            return None
        try:
            return UnixServer()
        except OSError:
            # Such sockets are forbidden here. The control channel is enough.
            return None

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when a connection waits."""
        return self._socket.fileno()

    def accept(self) -> list[UnixChannel]:
        """Accept waiting connections. May close the oldest ones that have not sent the secret."""
        accepted: list[UnixChannel] = []
        while len(accepted) < MAX_UNPROVEN:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # None waits, or it has left already.
                break
            if _is_same_user(connection):
                accepted.append(UnixChannel(connection, self.listener.secret))
            else:
                connection.close()
        self._unproven = {
            channel: None
            for channel in (*self._unproven, *accepted)
            if not (channel.over or channel.is_proven)
        }
        while len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.over = True
        return accepted

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(listener: UnixListener) -> UnixChannel | None:
    """Connect to a listener. Return None if no process of this host and user listens there."""
    if sys.platform != "linux":
        return None
    connection = _unix_socket()
    try:
        connection.connect(_address(listener))
        if _is_same_user(connection):
            channel = UnixChannel(connection)
            channel.send(listener.secret)
            return channel
    except OSError:
        # Another host or network namespace, or the listener's backlog is full.
        pass
    connection.close()
    return None


def _unix_socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    return connection


def _address(listener: UnixListener) -> str:
    return f"\0{listener.name}"


def _is_same_user(connected: socket.socket) -> bool:
    """Return whether the other end runs as this user, according to the kernel."""
    _, user = _credentials(connected)
    return user == os.geteuid()


def _credentials(connected: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def process_state(pid: int) -> str:
    """Return Linux's letter for a process's state; empty if it cannot be read."""
    try:
        # The process name in parentheses may contain anything, so look behind it.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
