"""Layouts: what a cache consists of, and how one side shards and pages it. Pure."""

from kvferry.layout.intervals import ALL_TOKENS, Span, Tokens
from kvferry.layout.layout import ExplicitSharding, Layout, Order, Parallel, Shard
from kvferry.layout.match import mismatches
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    StateRow,
    Tensor,
    Window,
    attention,
)

__all__ = [
    "ALL_TOKENS",
    "CacheSpec",
    "DType",
    "ExplicitSharding",
    "Group",
    "Layout",
    "Order",
    "Paged",
    "Parallel",
    "Shard",
    "Span",
    "StateRow",
    "Tensor",
    "Tokens",
    "Window",
    "attention",
    "mismatches",
]
