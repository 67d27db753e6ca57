"""Prefill servers known to a decode rank, by the bootstrap address that requests carry.

A bootstrap server is a discovery service, unless servers share another one (``KVFERRY_DISCOVERY``).
The registry lists its instances once and watches them, so that a restart is known before the next
request. Discovery clients have their own threads; the
scheduler's thread reads the last result, and waits only briefly for the first one of an address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvferry import (
    ClusterKey,
    DiscoveryClient,
    DiscoveryServer,
    InputError,
    InstanceView,
    KvferryError,
    Summaries,
    resolve_ip,
)
from kvferry.connectors.sglang.instances import PrefillInfo, instances_at, replicas_at

# Addresses come from clients, and each needs a thread.
MAX_PREFILLS = 256
# A reachable server responds within milliseconds.
FIRST_RESPONSE_S = 0.25


class BootstrapServer:
    """A prefill server's bootstrap server: a discovery service at SGLang's bootstrap port.

    Without a cluster key it listens on the loopback interface only.
    """

    def __init__(self, host: str, port: int) -> None:
        key = ClusterKey.from_environment()
        self._server = DiscoveryServer(host, port, key).start()

    def close(self) -> None:
        """Answer waiting requests, and stop."""
        self._server.stop()


class PrefillServer:
    """One bootstrap address.

    ``shared``: the client of the discovery service that all servers share; without one, the
    bootstrap server is asked. The scheduler's thread reads ``info`` and ``view``; callbacks run on
    the client's thread.
    """

    def __init__(
        self, address: str, key: ClusterKey | None, shared: DiscoveryClient | None = None
    ) -> None:
        self.address = address
        self.problem = "it has not responded yet"
        self._is_shared = shared is not None
        # As servers name themselves.
        self._numeric = numeric_address(address) if shared else address
        self._client = shared or DiscoveryClient(f"http://{address}", key)
        self._watches: dict[str, Callable[[InstanceView | None], None]] = {}
        self._listing: Future[Summaries] | None = None
        self._info: PrefillInfo | None = None
        self._views: dict[str, InstanceView] = {}
        self._complete = threading.Event()

    @property
    def info(self) -> PrefillInfo | None:
        """The server's replicas, if all are complete."""
        info = self._info
        return (
            info if info is not None and all(name in self._views for name in info.names) else None
        )

    def view(self, name: str) -> InstanceView | None:
        """Return the last view of a replica."""
        return self._views.get(name)

    def query(self) -> None:
        """List the instances, unless a request is pending; wait briefly for the first response."""
        if self._listing is None or self._listing.done():
            self._listing = self._client.instances()
            self._listing.add_done_callback(self._on_listing)
        self._complete.wait(FIRST_RESPONSE_S)

    def close(self) -> None:
        """Stop watching."""
        for name, callback in self._watches.items():
            self._client.unwatch(name, callback)
        if not self._is_shared:
            self._client.close()

    def _on_listing(self, listing: Future[Summaries]) -> None:
        try:
            # kvferry's own workers also register their HTTP addresses.
            listed = listing.result().instances
            names = [each.name for each in listed if each.transport != "http"]
            here = replicas_at(self._numeric, names) if self._is_shared else names
            info = instances_at(self.address, here)
        except KvferryError as error:
            self.problem = str(error)
            return
        if self._info is not None and self._info.names == info.names:
            return
        self._info = info
        for name in info.names:
            if name not in self._watches:
                self._watches[name] = partial(self._on_view, name)
                self._client.watch(name, self._watches[name])

    def _on_view(self, name: str, view: InstanceView | None) -> None:
        if view is None:
            self._views.pop(name, None)
            self._complete.clear()
            self.problem = f"a rank of {name} is missing"
            return
        self._views[name] = view
        if self.info is not None:
            self._complete.set()


class PrefillRegistry:
    """All requested addresses, up to a limit. Belongs to the scheduler's thread."""

    def __init__(self, key: ClusterKey | None, discovery: str | None = None) -> None:
        self._key = key
        self._shared = DiscoveryClient(discovery, key) if discovery else None
        self._servers: dict[str, PrefillServer] = {}
        self._rejection = ""

    def get(self, address: str) -> PrefillInfo | None:
        """Return the known server; SGLang calls this method."""
        server = self._servers.get(address)
        return None if server is None else server.info

    def find(self, address: str) -> PrefillInfo | None:
        """Return the server; query the address if it is not known."""
        server = self._server(address)
        if server is None:
            return None
        if server.info is None:
            server.query()
        return server.info

    def view(self, address: str, name: str) -> InstanceView | None:
        """Return the last view of a replica."""
        server = self._servers.get(address)
        return None if server is None else server.view(name)

    def problem(self, address: str) -> str:
        """Return why a server cannot be used."""
        server = self._servers.get(address)
        reason = self._rejection if server is None else server.problem
        return f"the prefill server at {address} cannot be used: {reason}"

    def close(self) -> None:
        """Stop watching all servers."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if self._shared is not None:
            self._shared.close()

    def _server(self, address: str) -> PrefillServer | None:
        if address not in self._servers:
            try:
                self._drop_unusable()
                self._servers[address] = PrefillServer(address, self._key, self._shared)
            except InputError as error:
                self._rejection = str(error)
                return None
        return self._servers[address]

    def _drop_unusable(self) -> None:
        """At the limit, drop an unusable address, or raise ``InputError``."""
        if len(self._servers) < MAX_PREFILLS:
            return
        for address, server in self._servers.items():
            if server.info is None:
                server.close()
                del self._servers[address]
                return
        raise InputError(f"{MAX_PREFILLS} prefill servers are known; use more decode servers")


def numeric_address(address: str) -> str:
    """Return a bootstrap address with its host as a number, as servers name themselves."""
    host, _, port = address.rpartition(":")
    return f"{resolve_ip(host.strip('[]'))}:{port}"
