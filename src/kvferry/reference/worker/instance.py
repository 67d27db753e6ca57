"""A worker: an engine on its ranks, its endpoints, and an HTTP API in front of it.

``run_instance`` is the whole life of a worker's process. The engine runs in a thread of its
own (``loop.py``), HTTP in the calling thread. Whoever started the worker learns that it is
ready from the ``ready`` callback, from ``GET /healthz``, or from the discovery service.

A worker registers there as ``<name>@http`` beside its ranks, with the metadata ``role``,
``http`` (its URL), ``model`` and ``instance`` (its name). Prefill ranks also register as
``<name>``, for decode ranks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvferry import (
    DiscoveryClient,
    EndpointConfig,
    InputError,
    Layers,
    Parallel,
    RankRecord,
    checked_bind_address,
    model_fingerprint,
    new_incarnation,
    read_config,
    resolve_ip,
)
from kvferry.http.connections import Connections
from kvferry.http.limits import limits_here
from kvferry.http.listening import bind_socket, http_url, load_cluster_key
from kvferry.http.site import HttpSite
from kvferry.reference.api.bodies import Serving
from kvferry.reference.api.routes import Api
from kvferry.reference.engine.engine import Engine, EngineOptions
from kvferry.reference.engine.requests import EngineRole
from kvferry.reference.models.config import layout_for
from kvferry.reference.ranks.rank import MakeExtension, no_extension
from kvferry.reference.transfer.extensions import (
    DecodeExtension,
    EndpointSettings,
    PrefillExtension,
)
from kvferry.reference.worker.loop import EngineLoop
from kvferry.router.worker_pool import WorkerRole
from kvferry.security.signing import RequestVerifier

log = logging.getLogger(__name__)

# "@" tells a worker from its ranks at the discovery service.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/-]{0,199}")
SHUTDOWN_S = 2.0
# The caller's connection, and one to the prefill worker that is asked how a room ended.
FILES_EACH = 2


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a worker. Without a room, a worker of either role computes a whole request.

    ``folder`` is the model's, ``model`` the name under which it is served (by default the
    folder's). ``advertise`` is the address at which others reach this host (by default
    ``host``). ``deadline_s`` is for a transfer whose caller gives none, ``request_s`` for a
    whole request; no transfer holds pages for longer. ``layers`` is how many layers a prefill
    worker pushes at a time.
    """

    role: WorkerRole
    name: str
    folder: str
    model: str = ""
    engine: EngineOptions = EngineOptions()
    transport: str = "auto"
    discovery: str | None = None
    key_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    deadline_s: float = 60.0
    request_s: float = 600.0
    layers: Layers = "auto"
    endpoint: EndpointConfig = EndpointConfig()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"the worker's name {self.name!r:.100} must begin with a letter or digit and have "
                f"only those and . _ : + / - (at most 200)"
            )
        for name in ("deadline_s", "request_s"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def served_as(self) -> str:
        """The model's name for callers."""
        return self.model or Path(self.folder).resolve().name

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint, which the other side must share. Reads files."""
        config = read_config(self.folder)
        return model_fingerprint(self.folder, config, dtype=str(self.engine.dtype))

    @property
    def reached_at(self) -> str:
        """The numeric address of this host for others."""
        host = self.advertise or self.host
        address = resolve_ip(host)
        if ipaddress.ip_address(address).is_unspecified:
            raise InputError(
                f"others cannot reach {host}; give an address that they can, with --advertise"
            )
        return address


def extension_for(options: InstanceOptions, url: str = "", life: str = "") -> MakeExtension:
    """Return the extension of every rank: an endpoint, if there is a discovery service."""
    if options.discovery is None:
        return no_extension
    settings = EndpointSettings(
        name=options.name,
        model=options.fingerprint,
        transport=options.transport,
        discovery=options.discovery,
        key_file=options.key_file,
        http=url,
        life=life,
        layers=options.layers,
        config=msgspec.structs.replace(options.endpoint, host=options.reached_at),
    )
    kind = PrefillExtension if options.role is WorkerRole.PREFILL else DecodeExtension
    return partial(kind, settings)


class EngineInstance:
    """A worker. ``start`` and ``stop`` belong to one event loop."""

    def __init__(self, options: InstanceOptions, extend: MakeExtension | None = None) -> None:
        self.options = options
        self._key = load_cluster_key(options.key_file)
        self._verifier = RequestVerifier(self._key.http) if self._key is not None else None
        # Refused without a key beyond loopback: whoever reaches a worker can have it compute.
        address = checked_bind_address(options.host, options.port, self._key)
        reached_at = options.reached_at
        self._listener = bind_socket(address, options.port)
        self.url = http_url(reached_at, self._listener)
        self._extend = extend
        role = EngineRole.PREFILL if options.role is WorkerRole.PREFILL else EngineRole.DECODE
        self.loop = EngineLoop(self._make_engine, role)
        self._role = EngineRole.WHOLE if options.discovery is None else role
        self._client: DiscoveryClient | None = None
        self._site: HttpSite | None = None

    def _make_engine(self) -> Engine:
        life = self._verifier.life if self._verifier is not None else ""
        extend = self._extend or extension_for(self.options, self.url, life)
        return Engine(Path(self.options.folder), self.options.engine, extend=extend)

    async def start(self) -> str:
        """Load the model, accept requests and register; return the URL."""
        options = self.options
        self.loop.begin()
        engine = await asyncio.wrap_future(self.loop.ready)
        blocks = engine.scheduler.blocks
        serving = Serving(
            model=options.served_as,
            tokenizer=engine.tokenizer,
            max_tokens=min(engine.config.max_tokens, blocks.num_pages * blocks.page_tokens),
            role=self._role,
            deadline_s=options.deadline_s,
            request_s=options.request_s,
        )
        api = Api(self.loop, serving, _about(options, engine), self._key, self._verifier)
        connections = Connections(limits_here(FILES_EACH), api.metrics.registry)
        self._site = HttpSite(api.application(), connections, shutdown_s=SHUTDOWN_S)
        await self._site.start(self._listener)
        self._register(engine)
        log.info("serving name=%s role=%s url=%s", options.name, options.role, self.url)
        return self.url

    def _register(self, engine: Engine) -> None:
        options = self.options
        if options.discovery is None:
            return
        self._client = DiscoveryClient(options.discovery, self._key)
        record = RankRecord(
            instance=f"{options.name}@http",
            rank=0,
            incarnation=new_incarnation(),
            fingerprint=options.fingerprint,
            # A record needs a layout; an HTTP server is a single place.
            layout=layout_for(engine.config, Parallel()),
            transport="http",
            control=self.url,
            metadata={
                "role": str(options.role),
                "http": self.url,
                "model": options.served_as,
                "instance": options.name,
            },
        )
        self._client.register(record, options.endpoint.lease_s)

    async def stop(self) -> None:
        """Deregister, and end every request and every rank. Idempotent."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self.loop.stop)
        if self._site is not None:
            await self._site.stop()
        self._listener.close()
        log.info("stopped name=%s", self.options.name)


def run_instance(options: InstanceOptions, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM; call ``ready`` with the URL once requests are accepted.

    Raises ``KvferryError`` if it cannot start, and ``RankLost`` if a rank is lost later; then
    everything has ended, and the worker may be started again.
    """
    asyncio.run(_run(options, ready))


async def _run(options: InstanceOptions, ready: Callable[[str], None]) -> None:
    stopped = asyncio.Event()
    here = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            here.add_signal_handler(number, stopped.set)
    instance = EngineInstance(options)
    stop = asyncio.create_task(stopped.wait())
    start = asyncio.create_task(instance.start())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        # The engine's thread cannot be interrupted; it and its ranks end with this process.
        return
    try:
        ready(start.result())
        died = asyncio.wrap_future(instance.loop.died)
        await asyncio.wait((died, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        await instance.stop()
    # A stuck engine is not even done.
    if instance.loop.died.done() and (reason := instance.loop.died.result()) is not None:
        raise reason


def _about(options: InstanceOptions, engine: Engine) -> dict[str, object]:
    parallel = options.engine.parallel
    return {
        "role": str(options.role),
        "name": options.name,
        "model": options.served_as,
        "transport": options.transport,
        "parallel": {"tp": parallel.tp, "pp": parallel.pp},
        "page_tokens": options.engine.page_tokens,
        "max_tokens": engine.config.max_tokens,
    }
