"""kvferry carries a request's KV cache between workers that shard it differently.

An engine imports everything it needs from here: layouts, endpoints, outcomes and discovery.
Servers may also use ``kvferry.http``, ``kvferry.security``, ``kvferry.telemetry`` and
``kvferry.dashboard``; tests may use ``kvferry.testing``. All other modules are private.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.config import LivenessConfig, ProtocolConfig
    from kvferry.digest import digest_of
    from kvferry.discovery.address import check_discovery_url, checked_address
    from kvferry.discovery.base import Discovery
    from kvferry.discovery.client import DiscoveryClient, discovery_at
    from kvferry.discovery.http.server import DiscoveryServer
    from kvferry.discovery.http.signer import RequestSigner
    from kvferry.discovery.http.status_server import StatusServer
    from kvferry.discovery.records import DiscoveryError, InstanceView, RankRecord, Summaries
    from kvferry.discovery.static import StaticDiscovery, StaticInstance
    from kvferry.discovery.status_page import find_status_url
    from kvferry.endpoint.config import EndpointConfig, ProofMode
    from kvferry.endpoint.freeze_gc import freeze_gc
    from kvferry.endpoint.incoming import Incoming
    from kvferry.endpoint.layer_push_tuner import EventRecorder, LayerPushTuner, Layers
    from kvferry.endpoint.lookups import PrefixQuery
    from kvferry.endpoint.outgoing import Outgoing, Waitable
    from kvferry.endpoint.rank_agreement import RankAgreement
    from kvferry.endpoint.setup import make_transport, make_transports, new_incarnation
    from kvferry.endpoint.source import SourceEndpoint
    from kvferry.endpoint.target import TargetEndpoint
    from kvferry.errors import (
        InputError,
        KvferryError,
        Misuse,
        Reason,
        ReasonCode,
        Refused,
        TransportError,
    )
    from kvferry.ids import MAX_NAME, Peer, Room
    from kvferry.layout.hf import spec_from_config
    from kvferry.layout.intervals import Span
    from kvferry.layout.layout import ExplicitSharding, Layout, Order, Parallel, Shard, find_shard
    from kvferry.layout.pages import touched_pages
    from kvferry.layout.spec import (
        CacheSpec,
        DType,
        Group,
        Paged,
        StateRow,
        Tensor,
        Window,
        attention,
        attention_group,
    )
    from kvferry.layout.tokens import Pattern, Tokens
    from kvferry.memory.pools import Memory, PoolArrays
    from kvferry.memory.warm import warm_up
    from kvferry.model_config import (
        decode_config,
        model_fingerprint,
        read_config,
    )
    from kvferry.plan.choose import TransferMode
    from kvferry.plan.cost import LinkCost
    from kvferry.plan.layers import LayersPerPush, layers_per_push
    from kvferry.plan.places import Base, Placement, PoolMap, Pools, contiguous_pools
    from kvferry.plan.plan import Plan, Request
    from kvferry.plan.reshard import reshard
    from kvferry.prefix import SPAN_TOKENS, PrefixChain, prefix_chain, span_digests
    from kvferry.protocol.outcome import Done, Failure, FailureCode, Outcome, Status
    from kvferry.regions import Device, Region
    from kvferry.security.keys import ClusterKey, checked_bind_address, resolve_ip
    from kvferry.telemetry.metrics import EndpointStats, ModeStats
    from kvferry.telemetry.observer import Observer
    from kvferry.transports.base import Transport
    from kvferry.transports.registry import ready_transports
    from kvferry.transports.transport_set import TransportSet

__all__ = [
    "MAX_NAME",
    "SPAN_TOKENS",
    "Base",
    "CacheSpec",
    "ClusterKey",
    "DType",
    "Device",
    "Discovery",
    "DiscoveryClient",
    "DiscoveryError",
    "DiscoveryServer",
    "Done",
    "EndpointConfig",
    "EndpointStats",
    "EventRecorder",
    "ExplicitSharding",
    "Failure",
    "FailureCode",
    "Group",
    "Incoming",
    "InputError",
    "InstanceView",
    "KvferryError",
    "LayerPushTuner",
    "Layers",
    "LayersPerPush",
    "Layout",
    "LinkCost",
    "LivenessConfig",
    "Memory",
    "Misuse",
    "ModeStats",
    "Observer",
    "Order",
    "Outcome",
    "Outgoing",
    "Paged",
    "Parallel",
    "Pattern",
    "Peer",
    "Placement",
    "Plan",
    "PoolArrays",
    "PoolMap",
    "Pools",
    "PrefixChain",
    "PrefixQuery",
    "ProofMode",
    "ProtocolConfig",
    "RankAgreement",
    "RankRecord",
    "Reason",
    "ReasonCode",
    "Refused",
    "Region",
    "Request",
    "RequestSigner",
    "Room",
    "Shard",
    "SourceEndpoint",
    "Span",
    "StateRow",
    "StaticDiscovery",
    "StaticInstance",
    "Status",
    "StatusServer",
    "Summaries",
    "TargetEndpoint",
    "Tensor",
    "Tokens",
    "TransferMode",
    "Transport",
    "TransportError",
    "TransportSet",
    "Waitable",
    "Window",
    "attention",
    "attention_group",
    "check_discovery_url",
    "checked_address",
    "checked_bind_address",
    "contiguous_pools",
    "decode_config",
    "digest_of",
    "discovery_at",
    "find_shard",
    "find_status_url",
    "freeze_gc",
    "layers_per_push",
    "make_transport",
    "make_transports",
    "model_fingerprint",
    "new_incarnation",
    "prefix_chain",
    "read_config",
    "ready_transports",
    "reshard",
    "resolve_ip",
    "span_digests",
    "spec_from_config",
    "touched_pages",
    "warm_up",
]
__version__ = "0.1.0"

# Where each name is, looked up when it is asked for: what is not used costs nothing.
_HOMES = {
    "config": "LivenessConfig ProtocolConfig",
    "digest": "digest_of",
    "discovery.address": "check_discovery_url checked_address",
    "discovery.base": "Discovery",
    "discovery.client": "DiscoveryClient discovery_at",
    "discovery.records": "InstanceView RankRecord DiscoveryError Summaries",
    "discovery.http.server": "DiscoveryServer",
    "discovery.http.signer": "RequestSigner",
    "discovery.http.status_server": "StatusServer",
    "discovery.status_page": "find_status_url",
    "discovery.static": "StaticDiscovery StaticInstance",
    "endpoint.rank_agreement": "RankAgreement",
    "endpoint.config": "EndpointConfig ProofMode",
    "endpoint.freeze_gc": "freeze_gc",
    "endpoint.incoming": "Incoming",
    "endpoint.layer_push_tuner": "EventRecorder Layers LayerPushTuner",
    "endpoint.lookups": "PrefixQuery",
    "endpoint.outgoing": "Outgoing Waitable",
    "endpoint.setup": "make_transport make_transports new_incarnation",
    "endpoint.source": "SourceEndpoint",
    "endpoint.target": "TargetEndpoint",
    "errors": "InputError KvferryError Misuse Reason ReasonCode Refused TransportError",
    "ids": "MAX_NAME Peer Room",
    "layout.hf": "spec_from_config",
    "layout.intervals": "Span",
    "layout.layout": "Shard Layout Order Parallel ExplicitSharding find_shard",
    "layout.pages": "touched_pages",
    "layout.spec": "CacheSpec DType Group Paged StateRow Tensor Window attention attention_group",
    "layout.tokens": "Pattern Tokens",
    "memory.warm": "warm_up",
    "memory.pools": "Memory PoolArrays",
    "model_config": "decode_config model_fingerprint read_config",
    "plan.choose": "TransferMode",
    "plan.cost": "LinkCost",
    "plan.layers": "LayersPerPush layers_per_push",
    "plan.places": "Base Placement PoolMap Pools contiguous_pools",
    "plan.plan": "Plan Request",
    "plan.reshard": "reshard",
    "prefix": "SPAN_TOKENS PrefixChain prefix_chain span_digests",
    "protocol.outcome": "Done Failure FailureCode Outcome Status",
    "regions": "Device Region",
    "security.keys": "ClusterKey checked_bind_address resolve_ip",
    "telemetry.metrics": "ModeStats EndpointStats",
    "telemetry.observer": "Observer",
    "transports.base": "Transport",
    "transports.registry": "ready_transports",
    "transports.transport_set": "TransportSet",
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
