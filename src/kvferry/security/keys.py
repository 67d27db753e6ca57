"""The cluster key: a secret file that all parties of a cluster share.

A party that has the file is trusted, and a party without it is refused. The secret is never sent
and never shown. Keyed BLAKE2b, with a label for each purpose, derives from it a CURVE
key pair for sockets that bind, one for sockets that connect, and a key that signs HTTP requests.

Keys are immutable and may be used on any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import zmq
from zmq.utils import z85

from kvferry.errors import InputError

KEY_FILE_VARIABLE = "KVFERRY_KEY_FILE"
SECRET_BYTES = 32
# The start of every key file.
PREFIX = "kvferry-key-1:"
MAX_FILE_BYTES = 4096
HOW_TO_MAKE_ONE = "make a cluster key with `kvferry key FILE` and copy it to every machine"


class CurvePair:
    """A CURVE key pair in ZeroMQ's encoding (Z85)."""

    __slots__ = ("public", "secret")

    def __init__(self, seed: bytes) -> None:
        self.secret: bytes = z85.encode(seed)
        self.public: bytes = zmq.curve_public(self.secret)

    def __repr__(self) -> str:
        return f"<CurvePair {self.public.decode()}>"


class ClusterKey:
    """A secret and the keys derived from it. ``name`` identifies the key and may be shown.

    ``server`` is the key pair of a control channel's bound socket, ``client`` that of a
    connecting one. ``http`` signs HTTP requests.
    """

    __slots__ = ("_secret", "client", "http", "name", "server")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise InputError(f"a cluster key has {SECRET_BYTES} bytes; {HOW_TO_MAKE_ONE}")
        self._secret = secret
        self.server = CurvePair(self._derive(b"curve server"))
        self.client = CurvePair(self._derive(b"curve client"))
        self.http = self._derive(b"http signing")
        self.name = self._derive(b"name").hex()[:8]

    def _derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(
            b"kvferry", key=self._secret, person=purpose, digest_size=SECRET_BYTES
        ).digest()

    @staticmethod
    def new() -> ClusterKey:
        """Return a new random key."""
        return ClusterKey(secrets.token_bytes(SECRET_BYTES))

    @staticmethod
    def read(path: str | Path) -> ClusterKey:
        """Read a key file, which only its owner may be able to read."""
        text = _read_private(path)
        digits = text.strip().removeprefix(PREFIX)
        try:
            return ClusterKey(bytes.fromhex(digits if text.startswith(PREFIX) else ""))
        except ValueError:
            raise InputError(f"{_shown(path)} is not a cluster key; {HOW_TO_MAKE_ONE}") from None

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> ClusterKey | None:
        """Read the key file that ``KVFERRY_KEY_FILE`` names; None if the variable is not set."""
        path = environment.get(KEY_FILE_VARIABLE)
        if path is None:
            return None
        if not path:
            raise InputError(f"{KEY_FILE_VARIABLE} is empty; name a key file or unset it")
        return ClusterKey.read(path)

    def write(self, path: str | Path) -> None:
        """Write a new file that only its owner can read. Never overwrites a file."""
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(
                f"{_shown(path)} exists; a cluster may be using it, so choose another path"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot write {_shown(path)}: {_why(error)}") from None
        try:
            with open(number, "w", encoding="ascii") as file:
                file.write(f"{PREFIX}{self._secret.hex()}\n")
        except OSError as error:
            os.unlink(path)
            raise InputError(f"cannot write {_shown(path)}: {_why(error)}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<ClusterKey {self.name}>"


def _read_private(path: str | Path) -> str:
    """Return a small file's text. Refuses a file that other users can read."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as file:
            mode = os.fstat(number).st_mode
            if not stat.S_ISREG(mode):
                raise InputError(f"{_shown(path)} is not a file; {HOW_TO_MAKE_ONE}")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InputError(
                    f"{_shown(path)} can be read by other users; run chmod 600 on it, "
                    f"and make a new key if somebody may have read it"
                )
            return file.read(MAX_FILE_BYTES).decode("ascii", "replace")
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the key file {_shown(path)}: {_why(error)}") from None


def _shown(path: str | Path) -> str:
    return f"{str(path)!r:.400}"


def _why(error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{reason}; check the path"


# ---------------------------------------------------------------- addresses to listen on


def checked_bind_address(host: str, port: int, key: ClusterKey | None) -> str:
    """Return the IP address to listen on. Without a key, only loopback is allowed."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"a port is between 0 and 65535, not {port}; 0 selects a free one")
    address = resolve_ip(host)
    if key is None and not ipaddress.ip_address(address).is_loopback:
        raise InputError(
            f"listening on {host} without a cluster key would let anyone in; "
            f"{HOW_TO_MAKE_ONE}, or use 127.0.0.1"
        )
    return address


def resolve_ip(host: str) -> str:
    """Return the IP address of a host, preferring IPv4, which every peer has."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InputError(f"cannot find the host {host!r:.200}; give an IP address") from None
    addresses = [str(where[0]).partition("%")[0] for *_, where in found]
    return min(addresses, key=lambda address: ":" in address)
