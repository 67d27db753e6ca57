"""Transfers between schedulers' pools without a server, in two chunks.

A ``PooledRank`` defines the pools and their contents; ``windows.py`` and ``auxiliary_pools.py``
have some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import backends
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType


class PooledRank(ABC):
    """One scheduler's pools, metadata rows and manager, for one request after another."""

    page: int
    rows: Any
    manager: Any
    # SGLang's sliding window, if the model has one.
    window: int | None = None

    @abstractmethod
    def allocate(self, num_tokens: int, *, computes: bool) -> list[int]:
        """Allocate pages for a request, which is computed here or received."""

    @abstractmethod
    def state(self) -> list[Any]:
        """Return the state indices that SGLang passes with these pages."""

    @abstractmethod
    def fill(self) -> None:
        """Write the request's entries, in place of a forward pass."""

    @abstractmethod
    def free_between_chunks(self) -> None:
        """Free what SGLang frees between two chunks."""


def transfer(
    backend: backends.Backend, prefill: Sequence[PooledRank], decode: PooledRank, num_tokens: int
) -> dict[str, Any]:
    """Transfer one request, whose room id is its length, and return the final statuses."""
    none = dict.fromkeys(("lora_id", "cache_salt", "extra_key", "multimodal_inputs"))
    request = SimpleNamespace(origin_input_ids=list(range(num_tokens)), **none), decode.window
    backends.wait_for(lambda: decode.manager.try_ensure_parallel_info(backend.address))
    receiver = backend.kind(KVClassType.RECEIVER)(decode.manager, backend.address, num_tokens)
    receiver.init(0)
    receiver.bind_request(*request)
    receiver.send_metadata(decode.allocate(num_tokens, computes=False), 0, decode.state())
    senders = []
    for rank, source in enumerate(prefill):
        with backends.as_rank(rank, len(prefill)):
            sender = backend.kind(KVClassType.SENDER)(source.manager, backend.address, num_tokens)
        sender.bind_request(*request)
        senders.append(sender)
    backends.wait_for(lambda: all(sender.poll() != KVPoll.Bootstrapping for sender in senders))
    for source, sender in zip(prefill, senders, strict=True):
        send_chunks(source, sender, num_tokens)
    backends.wait_for(lambda: receiver.poll() in backends.FINAL)
    backends.wait_for(lambda: all(sender.poll() in backends.FINAL for sender in senders))
    return backends.Room(receiver, senders).statuses


def send_chunks(source: PooledRank, sender: Any, num_tokens: int) -> None:
    """Send two chunks, or one if there is one page. The last chunk carries the state."""
    pages = source.allocate(num_tokens, computes=True)
    source.fill()
    source.rows.bootstrap_room[1, 0] = num_tokens
    sender.init(len(pages), 1)
    half = len(pages) // 2
    if half:
        sender.send(pages[:half], None, num_kv_tokens=half * source.page)
    source.free_between_chunks()
    sender.send(pages[half:], source.state(), num_kv_tokens=num_tokens - half * source.page)
