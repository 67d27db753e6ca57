"""A port for a server that binds it later, when it has loaded its model."""

from __future__ import annotations

import random
import socket

# Below those that kernels give to whoever asks for any: one of these would be taken in between,
# by a connection or a lifeline, once in a few hundred starts.
_FIRST, _LAST = 15_000, 30_000
_numbers = random.SystemRandom()


def later_port(host: str = "127.0.0.1") -> int:
    """A port that is free, and that nobody gets by chance."""
    while True:
        port = _numbers.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
