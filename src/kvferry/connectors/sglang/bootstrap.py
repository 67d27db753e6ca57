"""A prefill server's bootstrap server: a discovery service at SGLang's bootstrap port."""

from __future__ import annotations

from kvferry import ClusterKey, DiscoveryServer


class BootstrapServer:
    """Listens from the start. Without a cluster key it takes nobody from another machine."""

    def __init__(self, host: str, port: int) -> None:
        key = ClusterKey.from_environment()
        self._server = DiscoveryServer(host, port, key).start()

    def close(self) -> None:
        """Answer whoever waits, and end."""
        self._server.stop()
