"""A worker: an engine on its ranks, its endpoints, and an HTTP API in front of it.

``run_instance`` is the whole life of a worker's process. The engine runs in a thread of its
own (``service.py``), HTTP in the calling thread.

A worker registers as ``<name>@http`` beside its ranks, with the metadata ``role``, ``http`` (its
URL), ``model`` and ``instance`` (its name). Ranks that others read from register as ``<name>``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvferry import DiscoveryClient, RankRecord, checked_bind_address, new_incarnation
from kvferry.http.connections import Connections
from kvferry.http.limits import limits_here
from kvferry.http.listening import bind_socket, http_url, load_cluster_key
from kvferry.http.site import HttpSite
from kvferry.reference.api.bodies import Serving
from kvferry.reference.api.routes import Api
from kvferry.reference.engine.engine import Engine
from kvferry.reference.options import EngineOptions, InstanceOptions
from kvferry.reference.ranks.rank import Extension, MakeExtension
from kvferry.reference.transfer.extensions import PrefillExtension, RoomExtension
from kvferry.reference.worker.service import EngineService
from kvferry.router.worker_pool import WorkerRole
from kvferry.security.signing import RequestVerifier

log = logging.getLogger(__name__)

SHUTDOWN_S = 2.0
FILES_PER_REQUEST = 1


def extension_for(options: InstanceOptions) -> MakeExtension:
    """Return the extension of every rank: endpoints, if there is a discovery service."""
    if options.discovery is None:
        return Extension
    kind = PrefillExtension if options.role is WorkerRole.PREFILL else RoomExtension
    return partial(kind, options)


class EngineInstance:
    """A worker. ``start`` and ``stop`` belong to one event loop."""

    def __init__(self, options: InstanceOptions, extend: MakeExtension | None = None) -> None:
        self.options = options
        self._key = load_cluster_key(options.key_file)
        # Refused without a key beyond loopback: whoever reaches a worker can have it compute.
        address = checked_bind_address(options.host, options.port, self._key)
        reached_at = options.reached_at
        self._listener = bind_socket(address, options.port)
        self.url = http_url(reached_at, self._listener)
        folder, extend = Path(options.folder), extend or extension_for(options)
        make = partial(Engine, folder, options.engine, extend=extend)
        self.service = EngineService(make, options.name, options.role)
        self._client: DiscoveryClient | None = None
        self._site: HttpSite | None = None
        # Set when the instance is to be stopped.
        self.ending = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load the model, accept requests and register; return the URL."""
        options = self.options
        engine = await self.service.start()
        serving = Serving(options, engine.tokenizer, engine.max_tokens)
        verifier = RequestVerifier(self._key.http) if self._key is not None else None
        api = Api(self.service, serving, verifier, self.drain)
        connections = Connections(limits_here(FILES_PER_REQUEST), api.registry)
        self._site = HttpSite(api.application(), connections, shutdown_s=SHUTDOWN_S)
        await self._site.start(self._listener)
        if options.discovery is not None:
            self._register(engine, options.discovery)
        log.info("serving name=%s role=%s url=%s", options.name, options.role, self.url)
        return self.url

    def _register(self, engine: Engine, discovery: str) -> None:
        options = self.options
        self._client = DiscoveryClient(discovery, self._key)
        record = RankRecord(
            instance=f"{options.name}@http",
            rank=0,
            incarnation=new_incarnation(),
            fingerprint=options.fingerprint,
            # A record needs a layout; an HTTP server is a single place.
            layout=EngineOptions().layout(engine.config),
            transport="http",
            control=self.url,
            metadata={
                "role": str(options.role),
                "http": self.url,
                "model": options.model,
                "instance": options.name,
            },
        )
        self._client.register(record, options.endpoint.lease_s)

    def drain(self) -> None:
        """Take no new requests, and end after the last one, or after ``drain_s``. Idempotent."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._end_when_quiet())

    def on_sigterm(self) -> None:
        """Drain; if the instance drains already, end at once."""
        if self._draining is not None:
            self.ending.set()
        self.drain()

    async def _end_when_quiet(self) -> None:
        log.info("draining name=%s jobs=%d", self.options.name, len(self.service.jobs))
        with suppress(TimeoutError):
            async with asyncio.timeout(self.options.drain_s):
                await self.service.drain()
        log.info("drained name=%s jobs=%d", self.options.name, len(self.service.jobs))
        self.ending.set()

    async def stop(self) -> None:
        """Deregister, and end every request and every rank. Idempotent."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        await self.service.stop()
        if self._site is not None:
            await self._site.stop()
        self._listener.close()
        log.info("stopped name=%s", self.options.name)


def run_instance(options: InstanceOptions, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGTERM and the last request's end, or until SIGINT or a second SIGTERM.

    Calls ``ready`` with the URL once requests are accepted.
    Raises ``KvferryError`` if it cannot start, and ``RankLost`` if a rank is lost later; then
    everything has ended, and the worker may be started again.
    """
    asyncio.run(_run(options, ready))


async def _run(options: InstanceOptions, ready: Callable[[str], None]) -> None:
    here = asyncio.get_running_loop()
    instance = EngineInstance(options)
    if threading.current_thread() is threading.main_thread():
        here.add_signal_handler(signal.SIGINT, instance.ending.set)
        here.add_signal_handler(signal.SIGTERM, instance.on_sigterm)
    died = instance.service.died
    died.add_done_callback(lambda _: here.call_soon_threadsafe(instance.ending.set))
    try:
        # The engine's thread cannot be interrupted while it loads the model.
        ready(await instance.start())
        await instance.ending.wait()
    finally:
        await instance.stop()
    # A stuck engine is not even done.
    if died.done() and (reason := died.result()) is not None:
        raise reason
