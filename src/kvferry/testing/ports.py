"""Ports for servers that bind them later, when they have loaded their model."""

from __future__ import annotations

import random
import socket

# Below the range from which kernels choose ports. A port of that range is sometimes taken by
# another connection before the server binds it, once in a few hundred starts.
_FIRST, _LAST = 15_000, 30_000
_random = random.SystemRandom()


def later_port(host: str = "127.0.0.1") -> int:
    """Return a free port that no connection is given by chance."""
    while True:
        port = _random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
