"""Key, socket and URL of a server, before it listens."""

from __future__ import annotations

import os
import socket

from kvferry.errors import InputError
from kvferry.security.keys import ClusterKey


def load_cluster_key(file: str | None) -> ClusterKey | None:
    """Read the cluster key from ``file``, or from the file that ``KVFERRY_KEY_FILE`` names."""
    return ClusterKey.read(file) if file else ClusterKey.from_environment()


def bind_socket(address: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a used port is reported early."""
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
    """Return the URL of a bound socket, with ``address`` as its host."""
    port = listener.getsockname()[1]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
