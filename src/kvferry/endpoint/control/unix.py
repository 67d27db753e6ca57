"""Local lines: frames between processes of one host and user, without the threads of ZeroMQ.

A frame over ZeroMQ passes a thread of its own on either side, and waking them takes longer
than all else. So a source also listens on a Unix socket, and tells every target that it
welcomes where (``UnixListener``), in the handshake, which travels on the control channel: with a
cluster key, only who has it learns of the listener. A target that can connect talks there from
then on; one that can't, on another host or as another user, stays where it is. When a line
ends, the control channel is still there.

A line is a stream of frames, each preceded by its length, and before the first of them the
listener's secret. Both ends look who the other is: another user's process is not talked to. Names
are of Linux's abstract kind: no file is left behind, and no folder is needed.

Belongs to one thread, the endpoint's owner, and never waits: what a peer has no room for is
kept for a while, up to a limit.
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

from kvferry.protocol.codec import MAX_FRAME_BYTES

SECRET_BYTES = 32
BACKLOG = 128
# Lines that have not said the secret; of more, the oldest is closed.
MAX_UNPROVEN = 64
# What one call reads, so that the owner gets to its other work.
READ_BYTES = 256 << 10
# What is kept for a peer that reads nothing. More is lost, and the protocol repeats it.
MAX_UNSENT_BYTES = 32 << 20

# Running or ready to, sleeping, waiting for a device, idle.
RUNNING = ("R", "S", "D", "I")

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")


class UnixListener(msgspec.Struct, frozen=True, array_like=True):
    """Where a source listens, and what whoever comes has to say first."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]

    def __repr__(self) -> str:
        return f"<UnixListener {self.name}>"


class UnixChannel:
    """One connection. ``over`` says that nothing more will come; then it is to be closed."""

    def __init__(self, connected: socket.socket, expects: bytes = b"") -> None:
        connected.setblocking(False)
        self._socket = connected
        self._peer_pid, _ = _credentials(connected)
        self._expects = expects
        # The beginning of a frame, and how long it will be if that is known.
        self._in, self._awaited = bytearray(), 0
        self._out = bytearray()
        self.over = False

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether the peer has said what was expected."""
        return not self._expects

    @property
    def peer_runs(self) -> bool:
        """Whether the kernel says that the other end's process is not stopped. It may be starved.

        That needs nothing of the peer, neither a turn of its loop nor its GIL.
        """
        return not self.over and process_state(self._peer_pid) in RUNNING

    @property
    def num_unfinished(self) -> int:
        """Bytes of a frame whose rest has not come."""
        return len(self._in)

    @property
    def has_unsent(self) -> bool:
        """Whether the peer had no room for all: call ``resume`` when it is writable."""
        return bool(self._out)

    def send(self, message: bytes) -> bool:
        """Send all of it now or later, or nothing if too much waits already."""
        if self.over or len(self._out) + len(message) > MAX_UNSENT_BYTES:
            return False
        if self._out:
            self._out += message
        else:
            self._out += message[self._send(message) :]
        return not self.over

    def resume(self) -> None:
        """Send what the peer had no room for."""
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
        """The whole frames that have come. Never waits."""
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
            if not self._prove() or len(self._in) < self._awaited:
                return []
            data = bytes(self._in)
        frames, at = _cut(data)
        self._keep(data[at:])
        return frames

    def _keep(self, rest: bytes) -> None:
        """The beginning of a frame, which is looked at again when all of it has come."""
        self._in, self._awaited = bytearray(rest), 0
        if len(rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest)
            self._awaited = _LENGTH.size + length
            # Longer than any frame: not one of ours.
            self.over = length > MAX_FRAME_BYTES

    def _prove(self) -> bool:
        """Whether the peer has said what was expected; another word ends the line."""
        if self._expects and len(self._in) >= len(self._expects):
            said = bytes(self._in[: len(self._expects)])
            if hmac.compare_digest(said, self._expects):
                del self._in[: len(said)]
                self._expects = b""
            else:
                self.over = True
        return self.is_proven

    def close(self) -> None:
        """Hang up."""
        self.over = True
        self._socket.close()


def _cut(data: bytes) -> tuple[list[bytes], int]:
    """The whole frames in a stretch of a stream, and where they end."""
    frames: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        begin = at + _LENGTH.size
        if length > MAX_FRAME_BYTES or begin + length > len(data):
            break
        frames.append(data[begin : begin + length])
        at = begin + length
    return frames, at


class UnixServer:
    """A source's listener."""

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
        """A listener, where this system has such."""
        if sys.platform != "linux":
            return None
        try:
            return UnixServer()
        except OSError:
            # Sockets of this kind are forbidden here; the control channel is enough.
            return None

    def fileno(self) -> int:
        """For a poller: readable when somebody knocks."""
        return self._socket.fileno()

    def accept(self) -> list[UnixChannel]:
        """Who has come. Those who came before and have proven nothing may be closed for them."""
        lines: list[UnixChannel] = []
        while len(lines) < MAX_UNPROVEN:
            try:
                came, _ = self._socket.accept()
            except OSError:
                # Nobody, or somebody who has left already.
                break
            if _is_ours(came):
                lines.append(UnixChannel(came, self.listener.secret))
            else:
                came.close()
        self._unproven = {
            line: None for line in (*self._unproven, *lines) if not (line.over or line.is_proven)
        }
        while len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.over = True
        return lines

    def close(self) -> None:
        """Nobody comes any more."""
        self._socket.close()


def connect(listener: UnixListener) -> UnixChannel | None:
    """A line to who listens at that listener; None if nobody of ours does."""
    if sys.platform != "linux":
        return None
    going = _unix_socket()
    try:
        going.connect(_address(listener))
        if _is_ours(going):
            line = UnixChannel(going)
            line.send(listener.secret)
            return line
    except OSError:
        # Another host, or another network namespace of this one, or too many at the listener.
        pass
    going.close()
    return None


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _address(listener: UnixListener) -> str:
    return f"\0{listener.name}"


def _is_ours(connected: socket.socket) -> bool:
    """Whether the other end is a process of this user. The kernel says so."""
    _, user = _credentials(connected)
    return user == os.geteuid()


def _credentials(connected: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(said)
    return pid, user


def process_state(pid: int) -> str:
    """The letter that Linux has for a process's state; empty if there is none to be seen."""
    try:
        # The name in parentheses may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
