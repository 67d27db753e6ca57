"""kvferry carries a request's KV cache between workers that shard it differently.

What an engine needs is here: layouts, endpoints, how rooms end, how ranks agree, the
rendezvous. ``kvferry.http``, ``kvferry.logs``, ``kvferry.mailbox``, ``kvferry.observe`` and
``kvferry.sse`` help servers; ``kvferry.testing`` helps tests. Whatever else is inside may change
at any time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.config import LivenessConfig, ProtocolConfig
    from kvferry.copy.cpu import warm_up
    from kvferry.digest import digest_of
    from kvferry.errors import (
        BrokenPlan,
        InputError,
        KvferryError,
        Misuse,
        Reason,
        ReasonCode,
        Refused,
        TransportError,
    )
    from kvferry.heap import settle_heap
    from kvferry.ids import MAX_NAME, Peer, Room
    from kvferry.keys import ClusterKey, bindable, numeric
    from kvferry.layout.hf import spec_from_config
    from kvferry.layout.intervals import Span, Tokens
    from kvferry.layout.layout import Holding, Layout, Order, Parallel, Stated, find_holding
    from kvferry.layout.pages import touched_pages
    from kvferry.layout.spec import (
        CacheSpec,
        DType,
        Group,
        Paged,
        Slot,
        Tensor,
        Window,
        attention,
        attention_group,
    )
    from kvferry.memory.pools import Memory, PoolArrays
    from kvferry.model_config import (
        config_as,
        config_bytes,
        model_fingerprint,
        read_config,
    )
    from kvferry.plan.choose import Path
    from kvferry.plan.cost import PRESETS, Constants
    from kvferry.plan.layers import LayersPerPush, layers_per_push
    from kvferry.plan.places import Base, Placement, PoolMap, Pools, contiguous_pools
    from kvferry.plan.plan import Plan, Request
    from kvferry.plan.reshard import reshard
    from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status
    from kvferry.regions import Device, Region
    from kvferry.rendezvous.address import checked_address
    from kvferry.rendezvous.client import RendezvousClient
    from kvferry.rendezvous.discovery import Discovery
    from kvferry.rendezvous.records import InstanceView, RankRecord, RendezvousError, Summaries
    from kvferry.rendezvous.server import RendezvousServer
    from kvferry.rendezvous.signer import RequestSigner
    from kvferry.rendezvous.static_discovery import StaticDiscovery, StaticInstance
    from kvferry.runtime.agreement import Agreement
    from kvferry.runtime.config import EndpointConfig
    from kvferry.runtime.incoming import Incoming
    from kvferry.runtime.outgoing import Outgoing, Waitable
    from kvferry.runtime.pace import DeviceMarks, Layers, Pace, TimedEvent
    from kvferry.runtime.setup import make_transport, make_transports, new_incarnation
    from kvferry.runtime.source import SourceEndpoint
    from kvferry.runtime.target import TargetEndpoint
    from kvferry.telemetry.metrics import PathStats, Stats
    from kvferry.telemetry.observer import Observer
    from kvferry.transport.base import Setup, Transport
    from kvferry.transport.registry import ready_transports, transport_class
    from kvferry.transport.several import TransportSet

__all__ = [
    "MAX_NAME",
    "PRESETS",
    "Agreement",
    "Base",
    "BrokenPlan",
    "CacheSpec",
    "ClusterKey",
    "Constants",
    "DType",
    "Device",
    "DeviceMarks",
    "Discovery",
    "Done",
    "EndpointConfig",
    "Failure",
    "FailureCode",
    "Group",
    "Holding",
    "Incoming",
    "InputError",
    "InstanceView",
    "KvferryError",
    "Layers",
    "LayersPerPush",
    "Layout",
    "LivenessConfig",
    "Memory",
    "Misuse",
    "Observer",
    "Order",
    "Outcome",
    "Outgoing",
    "Pace",
    "Paged",
    "Parallel",
    "Path",
    "PathStats",
    "Peer",
    "Placement",
    "Plan",
    "PoolArrays",
    "PoolMap",
    "Pools",
    "ProtocolConfig",
    "RankRecord",
    "Reason",
    "ReasonCode",
    "Refused",
    "Region",
    "RendezvousClient",
    "RendezvousError",
    "RendezvousServer",
    "Request",
    "RequestSigner",
    "Room",
    "Setup",
    "Slot",
    "SourceEndpoint",
    "Span",
    "Stated",
    "StaticDiscovery",
    "StaticInstance",
    "Stats",
    "Status",
    "Summaries",
    "TargetEndpoint",
    "Tensor",
    "TimedEvent",
    "Tokens",
    "Transport",
    "TransportError",
    "TransportSet",
    "Waitable",
    "Window",
    "attention",
    "attention_group",
    "bindable",
    "checked_address",
    "config_as",
    "config_bytes",
    "contiguous_pools",
    "digest_of",
    "find_holding",
    "layers_per_push",
    "make_transport",
    "make_transports",
    "model_fingerprint",
    "new_incarnation",
    "numeric",
    "read_config",
    "ready_transports",
    "reshard",
    "settle_heap",
    "spec_from_config",
    "touched_pages",
    "transport_class",
    "warm_up",
]
__version__ = "0.1.0"

# Where each name is, looked up when it is asked for: what is not used costs nothing.
_HOMES = {
    "config": "LivenessConfig ProtocolConfig",
    "copy.cpu": "warm_up",
    "digest": "digest_of",
    "errors": "BrokenPlan InputError KvferryError Misuse Reason ReasonCode Refused TransportError",
    "heap": "settle_heap",
    "ids": "MAX_NAME Peer Room",
    "keys": "ClusterKey bindable numeric",
    "layout.hf": "spec_from_config",
    "layout.intervals": "Span Tokens",
    "layout.layout": "Holding Layout Order Parallel Stated find_holding",
    "layout.pages": "touched_pages",
    "layout.spec": "CacheSpec DType Group Paged Slot Tensor Window attention attention_group",
    "model_config": "config_as config_bytes model_fingerprint read_config",
    "plan.choose": "Path",
    "plan.cost": "PRESETS Constants",
    "plan.layers": "LayersPerPush layers_per_push",
    "plan.places": "Base Placement PoolMap Pools contiguous_pools",
    "plan.plan": "Plan Request",
    "plan.reshard": "reshard",
    "protocol.outcome": "Done Failure FailureCode Outcome Status",
    "regions": "Device Region",
    "rendezvous.address": "checked_address",
    "rendezvous.client": "RendezvousClient",
    "rendezvous.discovery": "Discovery",
    "rendezvous.records": "InstanceView RankRecord RendezvousError Summaries",
    "rendezvous.server": "RendezvousServer",
    "rendezvous.signer": "RequestSigner",
    "rendezvous.static_discovery": "StaticDiscovery StaticInstance",
    "runtime.agreement": "Agreement",
    "runtime.config": "EndpointConfig",
    "runtime.incoming": "Incoming",
    "memory.pools": "Memory PoolArrays",
    "runtime.outgoing": "Outgoing Waitable",
    "runtime.pace": "DeviceMarks Layers Pace TimedEvent",
    "runtime.setup": "make_transport make_transports new_incarnation",
    "runtime.source": "SourceEndpoint",
    "runtime.target": "TargetEndpoint",
    "telemetry.metrics": "PathStats Stats",
    "telemetry.observer": "Observer",
    "transport.base": "Setup Transport",
    "transport.registry": "ready_transports transport_class",
    "transport.several": "TransportSet",
}
_PUBLIC = {name: f"kvferry.{home}" for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # A type checker would take any name for one that is found here.

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"kvferry has no {name!r}")
        value: object = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
