"""Helpers of the endpoint tests: small caches, transports with their settings, waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.config import ProtocolConfig
from kvferry.discovery.records import InstanceView, RankRecord, RankView
from kvferry.endpoint.config import EndpointConfig
from kvferry.layout.layout import Layout, Order, Parallel
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    Part,
    StateRow,
    Tensor,
    Window,
    attention,
    attention_group,
)
from kvferry.plan.choose import TransferMode

# K and V differ in width, so that a mix-up is noticed.
HEADS = attention(layers=3, kv_heads=12, head_dim=8, v_head_dim=6)
FEW_HEADS = attention(layers=2, kv_heads=2, head_dim=48)
LATENT = CacheSpec(
    num_layers=3,
    groups=(
        Group("latent", Paged(), (0, 1, 2), 1, (Tensor("ckv", DType.BFLOAT16, 72),)),
        Group("index", Paged(), (0, 2), 1, (Tensor("k", DType.UINT8, 5),)),
    ),
)
# Compressed attention in small: entries with parts, for 1, 4 and 16 tokens, and windows.
_PACKED = Tensor.composite(
    "latent", Part("values", DType.FLOAT8_E4M3, 20), Part("rotary", DType.BFLOAT16, 3)
)
COMPRESSED = CacheSpec(
    num_layers=4,
    groups=(
        Group("swa", Window(20), (0, 1, 2, 3), 1, (_PACKED,)),
        Group("sparse", Paged(), (1, 2), 1, (_PACKED, Tensor("scale", DType.UINT8, 3)), 4),
        Group("heavy", Paged(), (0, 3), 1, (_PACKED,), 16),
        Group("inputs", Window(8), (1, 2), 1, (Tensor("kv", DType.FLOAT32, 5),)),
    ),
)
# Full attention, window attention and recurrent state, each in some layers.
HYBRID = CacheSpec(
    num_layers=4,
    groups=(
        attention_group("full", Paged(), (0, 3), 4, 16, None, DType.BFLOAT16),
        attention_group("near", Window(20), (1,), 4, 16, None, DType.BFLOAT16),
        Group("conv", StateRow(), (1, 2), 8, (Tensor("state", DType.FLOAT32, 3),)),
        Group("ssm", StateRow(), (2,), 4, (Tensor("state", DType.FLOAT32, 33),)),
    ),
)


# Timers for tests that wait for a silence: short, but long enough for a busy machine.
QUICK = ProtocolConfig(
    heartbeat_s=0.2,
    silence_s=2.0,
    handshake_s=3.0,
    resend_s=0.1,
    status_poll_s=0.3,
    unclaimed_offer_ttl_s=6.0,
)


class Way(NamedTuple):
    """A transport with the endpoints' configuration and device."""

    transport: str
    config: EndpointConfig
    device: str = "cpu"

    def __str__(self) -> str:
        mode, protocol = self.config.mode, self.config.protocol
        ahead = f"-ahead-{protocol.local_slots}" if protocol.early_gather_slots else ""
        name = f"{self.transport}-{mode}{ahead}" if mode else self.transport
        return name if self.device == "cpu" else f"{name}-on-{self.device}"

    @property
    def maps_peer(self) -> bool:
        """Whether a source maps a target's memory."""
        return self.transport in ("shm", "cuda")


# Few slots of the smallest size, so that a room uses each several times.
NUM_SLOTS = 4
STAGED = EndpointConfig(mode=TransferMode.STAGED, slot_bytes=4096, staging_bytes=NUM_SLOTS * 4096)
DIRECT = EndpointConfig(mode=TransferMode.SLICES, staging_bytes=0)
# The same with early gathers.
AHEAD = replace(STAGED, protocol=ProtocolConfig(early_gather_slots=2, local_slots=NUM_SLOTS))
# With one slot, which a transfer without a credit gives back to one that has it.
ONE_AHEAD = replace(
    AHEAD, staging_bytes=4096, protocol=ProtocolConfig(early_gather_slots=2, local_slots=1)
)
PLAIN = [Way(name, EndpointConfig()) for name in ("shm", "nixl", "mooncake")]
STAGING = [Way(name, STAGED) for name in ("nixl", "mooncake")]
UNSTAGED = [Way(name, DIRECT) for name in ("nixl", "mooncake")]
# Between pools on a GPU, where transfers gather early by default.
ON_GPU = [
    Way("cuda", EndpointConfig(), "cuda"),
    *(Way("nixl", config, "cuda") for config in (STAGED, ONE_AHEAD)),
]


def layout(
    spec: CacheSpec,
    page: int = 4,
    order: Order = Order.NHD,
    **sizes: int,
) -> Layout:
    """Return a layout with these parallel sizes."""
    return Layout(spec, Parallel(**sizes), page_tokens=page, order=order)  # type: ignore[arg-type]


def with_pages(its: Layout, **sizes: int) -> Layout:
    """Return the layout with other page sizes for some groups."""
    return replace(its, group_pages=tuple(sizes.items()))


def eventually(what: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    give_up = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < give_up, f"still false after {within_s} s"
        time.sleep(0.005)


def view_of(record: RankRecord) -> InstanceView:
    """The instance that has this rank only."""
    rank = RankView(record.rank, record.incarnation, record.control)
    its = (record.fingerprint, record.layout, record.transport)
    return InstanceView(record.instance, "", *its, (rank,))
