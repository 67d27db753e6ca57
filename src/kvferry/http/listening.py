"""Listening: what every part that does so has alike, its key, its socket, its address."""

from __future__ import annotations

import os
import socket

from kvferry.errors import InputError
from kvferry.security.keys import ClusterKey


def key_in(file: str | None) -> ClusterKey | None:
    """The cluster's key in that file, or in the one that ``KVFERRY_KEY_FILE`` names."""
    return ClusterKey.read(file) if file else ClusterKey.from_environment()


def bound(address: str, port: int) -> socket.socket:
    """Bound, not yet listening, so that a port in use is said before anything takes long."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen on {address}:{port}: {os.strerror(error.errno or 0)}; "
            f"choose another address or port, or port 0 for any"
        ) from None
    return listener


def http_url(address: str, listener: socket.socket) -> str:
    """How others reach what listens there."""
    port = listener.getsockname()[1]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
