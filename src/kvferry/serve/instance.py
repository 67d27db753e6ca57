"""One worker: an engine on its ranks, its endpoints, and an HTTP API in front of it.

``run_instance`` is the whole life of a worker's process. The engine runs in a
thread of its own (``loop.py``), HTTP in the thread that calls; they talk through
queues. Nothing is printed. Whoever started the worker learns that it is ready
from the ``ready`` callback, from ``GET /healthz``, or from the rendezvous:

A worker registers there as ``<name>@http`` beside its ranks, with the metadata
``role``, ``http`` (its URL), ``model`` and ``instance`` (its name, as ``prefill``
in a body wants it). Prefill ranks also register as ``<name>``, for decode ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from kvferry.runtime.config import EndpointConfig
from kvferry.serve.engine import EngineOptions


class WorkerRole(StrEnum):
    """Which half of a request a worker computes for others. Alone, either can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is made from.

    ``folder`` is the model's, ``model`` the name under which it is served (the
    folder's, if empty). ``advertise`` is the numeric address at which others reach
    this host, for HTTP and for transfers; ``host`` if empty. ``deadline_s`` is for
    a transfer whose caller names none, ``request_s`` for every request as a whole.
    """

    role: WorkerRole
    name: str
    folder: str
    model: str = ""
    engine: EngineOptions = EngineOptions()
    transport: str = "shm"
    rendezvous: str | None = None
    key_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    deadline_s: float = 60.0
    request_s: float = 600.0
    endpoint: EndpointConfig = EndpointConfig()


def run_instance(
    options: InstanceOptions, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGINT or SIGTERM; ``ready`` is called with the URL once requests are taken.

    Raises ``KvferryError`` with one sentence if it can't start, and ``RankLost``
    if a rank is lost later: then everything has ended, and it may be started again.
    """
    raise NotImplementedError
