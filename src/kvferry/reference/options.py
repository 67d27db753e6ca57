"""Options of an engine, and of the worker that serves it. Imports no torch."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

import msgspec
from msgspec import Meta

import kvferry
from kvferry import (
    DType,
    EndpointConfig,
    InputError,
    Layers,
    Layout,
    Order,
    Parallel,
    ReasonCode,
    Refused,
    model_fingerprint,
    read_config,
)
from kvferry.reference.models.config import ModelConfig
from kvferry.router.worker_pool import WorkerRole

Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]

POSITIVE = ("tp", "page", "cache_tokens", "max_requests", "step_tokens", "threads", "lost_s")
DTYPES = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
# "@" tells a worker from its ranks at the discovery service.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/-]{0,199}")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine shards, pages and batches. ``threads`` is per rank.

    ``max_requests`` are computed at a time. A worker takes ``max_in_flight`` requests, of
    ``max_in_flight_tokens`` tokens with their longest answers, and answers more with status 429.
    None is twice ``max_requests``, and twice ``cache_tokens``.
    ``step_tokens`` bounds one step, and so a chunk. Ranks have ``timeout_s`` to start; a step in
    which a rank does not answer for ``lost_s`` ends the engine.
    """

    tp: Count = 1
    page: Count = 16
    order: Order = Order.NHD
    dtype: DType = DType.FLOAT32
    device: str = "cpu"
    threads: Count = 1
    cache_tokens: Count = 8192
    max_requests: Count = 32
    max_in_flight: Count | None = None
    max_in_flight_tokens: Count | None = None
    step_tokens: Count = 256
    prefix_cache: bool = True
    timeout_s: float = 120.0
    lost_s: float = 20.0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device is cpu or cuda, not {self.device!r:.40}")
        if self.dtype not in DTYPES:
            raise InputError(f"this engine computes in {', '.join(DTYPES)}, not {self.dtype}")
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be above 0, not {getattr(self, name):g}")

    @property
    def in_flight_limit(self) -> int:
        """The largest number of requests that a worker takes at a time."""
        return self.max_in_flight or 2 * self.max_requests

    @property
    def in_flight_token_limit(self) -> int:
        """The largest number of tokens of these requests."""
        return self.max_in_flight_tokens or 2 * self.cache_tokens

    def layout(self, config: ModelConfig) -> Layout:
        """Return the layout of the cache, from which a rank's heads and its memory follow."""
        if self.tp > config.heads:
            raise Refused.because(
                ReasonCode.TP_UNITS,
                f"tp={self.tp} is more ranks than the model's {config.heads} query heads; lower tp",
            )
        spec, parallel = config.cache(self.dtype), Parallel(tp=self.tp)
        return Layout(spec, parallel, page_tokens=self.page, order=self.order)


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a worker. Without a room, a worker of either role computes a whole request.

    ``folder`` is the model's, ``model`` the name under which it is served. ``advertise`` is the
    address at which others reach this host (by default ``host``). ``deadline_s`` is the longest
    time for a transfer. ``drain_s`` is the longest time from SIGTERM to the worker's end.
    ``layers`` is how many layers a prefill worker pushes at a time.
    """

    role: WorkerRole
    name: str
    folder: str
    model: str
    engine: EngineOptions = EngineOptions()
    transport: str = "auto"
    discovery: str | None = None
    key_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    deadline_s: float = 60.0
    drain_s: float = 600.0
    layers: Layers = "auto"
    endpoint: EndpointConfig = EndpointConfig()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"the worker's name {self.name!r:.100} must begin with a letter or digit and have "
                f"only those and . _ : + / - (at most 200)"
            )
        for name in ("deadline_s", "drain_s"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def fingerprint(self) -> str:
        """The checkpoint's fingerprint, which the other side must share. Reads files."""
        config = read_config(self.folder)
        return model_fingerprint(self.folder, config, dtype=str(self.engine.dtype))

    @property
    def reached_at(self) -> str:
        """The numeric address of this host for others."""
        host = self.advertise or self.host
        # Loaded here, so that the command line works without ZeroMQ.
        address = kvferry.resolve_ip(host)
        if ipaddress.ip_address(address).is_unspecified:
            raise InputError(
                f"others cannot reach {host}; give an address that they can, with --advertise"
            )
        return address
