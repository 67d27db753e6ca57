"""kvferry carries a request's KV cache between workers that shard it differently."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.digest import digest_of
    from kvferry.runtime.config import EndpointConfig
    from kvferry.runtime.keys import ClusterKey
    from kvferry.runtime.memory import Memory
    from kvferry.runtime.setup import make_transport
    from kvferry.runtime.source import SourceEndpoint
    from kvferry.runtime.target import TargetEndpoint

__all__ = [
    "ClusterKey",
    "EndpointConfig",
    "Memory",
    "SourceEndpoint",
    "TargetEndpoint",
    "digest_of",
    "make_transport",
]
__version__ = "0.1.0"

# What an engine needs, found when it is asked for: planning alone needs none of it.
_PUBLIC = {
    "ClusterKey": "kvferry.runtime.keys",
    "EndpointConfig": "kvferry.runtime.config",
    "Memory": "kvferry.runtime.memory",
    "SourceEndpoint": "kvferry.runtime.source",
    "TargetEndpoint": "kvferry.runtime.target",
    "digest_of": "kvferry.digest",
    "make_transport": "kvferry.runtime.setup",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"kvferry has no {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
