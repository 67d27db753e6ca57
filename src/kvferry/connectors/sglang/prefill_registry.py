"""Prefill servers that a decode rank knows, by the bootstrap address that requests carry.

Each address is a discovery service. Who is registered there is asked once, and the instances are
followed from then on, so that a restart is known before the next request. Questions are asked on
a discovery client's thread; the scheduler's looks at what is known, and waits only a moment for
the first answer of an address.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

from kvferry import (
    ClusterKey,
    DiscoveryClient,
    InputError,
    InstanceView,
    KvferryError,
    Summaries,
)
from kvferry.connectors.sglang.instances import PrefillInfo, instances_at

# Addresses come from clients, and each costs a thread.
MAX_PREFILLS = 256
# An answer from a server that is there comes within milliseconds.
FIRST_ANSWER_S = 0.25


class PrefillServer:
    """One address. ``info`` and ``view`` are for the scheduler, the rest runs on the client's."""

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.address = address
        self.problem = "it has not answered yet"
        self._client = DiscoveryClient(f"http://{address}", key)
        self._asked: Future[Summaries] | None = None
        self._info: PrefillInfo | None = None
        self._views: dict[str, InstanceView] = {}
        self._complete = threading.Event()

    @property
    def info(self) -> PrefillInfo | None:
        """Its replicas, if all of them are there."""
        info = self._info
        return (
            info if info is not None and all(name in self._views for name in info.names) else None
        )

    def view(self, name: str) -> InstanceView | None:
        """One of its replicas as it is now."""
        return self._views.get(name)

    def ask(self) -> None:
        """Ask who is registered, unless that is under way; wait a moment for the first answer."""
        if self._asked is None or self._asked.done():
            self._asked = self._client.instances()
            self._asked.add_done_callback(self._learn)
        self._complete.wait(FIRST_ANSWER_S)

    def close(self) -> None:
        """Ask no more."""
        self._client.close()

    def _learn(self, asked: Future[Summaries]) -> None:
        try:
            # kvferry's own workers announce their HTTP addresses beside their ranks.
            listed = asked.result().instances
            names = [each.name for each in listed if each.transport != "http"]
            info = instances_at(self.address, names)
        except KvferryError as error:
            self.problem = str(error)
            return
        if self._info is not None and self._info.names == info.names:
            return
        self._info = info
        for name in info.names:
            self._client.watch(name, partial(self._take, name))

    def _take(self, name: str, view: InstanceView | None) -> None:
        if view is None:
            self._views.pop(name, None)
            self._complete.clear()
            self.problem = f"{name} is not there with all its ranks"
            return
        self._views[name] = view
        if self.info is not None:
            self._complete.set()


class PrefillRegistry:
    """Every address that was ever asked for, within limits. The scheduler's thread."""

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._servers: dict[str, PrefillServer] = {}
        self._refused = ""

    def get(self, address: str) -> PrefillInfo | None:
        """What is known now; SGLang's name for it."""
        server = self._servers.get(address)
        return None if server is None else server.info

    def find(self, address: str) -> PrefillInfo | None:
        """The same, and asked for where it is not known."""
        server = self._server(address)
        if server is None:
            return None
        if server.info is None:
            server.ask()
        return server.info

    def view(self, address: str, name: str) -> InstanceView | None:
        """One replica as it is now."""
        server = self._servers.get(address)
        return None if server is None else server.view(name)

    def problem(self, address: str) -> str:
        """Why nothing is known of an address."""
        server = self._servers.get(address)
        why = self._refused if server is None else server.problem
        return f"the prefill server at {address} can't be used: {why}"

    def _server(self, address: str) -> PrefillServer | None:
        if address not in self._servers:
            try:
                self._make_room()
                self._servers[address] = PrefillServer(address, self._key)
            except InputError as error:
                self._refused = str(error)
                return None
        return self._servers[address]

    def _make_room(self) -> None:
        """Forget the first address that leads nowhere, if there are too many."""
        if len(self._servers) < MAX_PREFILLS:
            return
        for address, server in self._servers.items():
            if server.info is None:
                server.close()
                del self._servers[address]
                return
        raise InputError(f"{MAX_PREFILLS} prefill servers are known; use more decode servers")
