"""Requests between schedulers' pools without a server, sent as schedulers would: in two chunks.

What the pools are, and what is where in them, is a ``PooledRank``'s own: ``windows.py`` and
``auxiliary_pools.py`` have some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import classes
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType

PATIENCE_S = 30.0


class PooledRank(ABC):
    """One scheduler's pools, metadata rows and manager, for one request after another."""

    page: int
    rows: Any
    manager: Any
    # SGLang's window, where there is one.
    window: int | None = None

    @abstractmethod
    def allocate(self, num_tokens: int, *, computes: bool) -> list[int]:
        """Pages for a request: one that is computed here, or that comes here."""

    @abstractmethod
    def state(self) -> list[Any]:
        """What SGLang names beside these pages."""

    @abstractmethod
    def fill(self) -> None:
        """Compute it."""

    @abstractmethod
    def forget(self) -> None:
        """What SGLang frees between two chunks."""


def wait_for(happens: Any) -> None:
    classes.wait_for(happens, PATIENCE_S)


def carry(
    backend: classes.Backend, prefill: Sequence[PooledRank], decode: PooledRank, num_tokens: int
) -> dict[str, Any]:
    """One request, whose room is its length. How it ended on all sides."""
    none = dict.fromkeys(("lora_id", "cache_salt", "extra_key", "multimodal_inputs"))
    told = SimpleNamespace(origin_input_ids=list(range(num_tokens)), **none), decode.window
    wait_for(lambda: decode.manager.try_ensure_parallel_info(backend.address))
    receiver = backend.kind(KVClassType.RECEIVER)(decode.manager, backend.address, num_tokens)
    receiver.init(0)
    receiver.bind_request(*told)
    receiver.send_metadata(decode.allocate(num_tokens, computes=False), 0, decode.state())
    senders = []
    for rank, one in enumerate(prefill):
        with classes.as_rank(rank, len(prefill)):
            sender = backend.kind(KVClassType.SENDER)(one.manager, backend.address, num_tokens)
        sender.bind_request(*told)
        senders.append(sender)
    wait_for(lambda: all(sender.poll() != KVPoll.Bootstrapping for sender in senders))
    for one, sender in zip(prefill, senders, strict=True):
        send(one, sender, num_tokens)
    wait_for(lambda: receiver.poll() in classes.ENDS)
    wait_for(lambda: all(sender.poll() in classes.ENDS for sender in senders))
    return classes.Room(receiver, senders).ends


def send(one: PooledRank, sender: Any, num_tokens: int) -> None:
    """In two chunks, if there are two pages; the last of them carries state."""
    pages = one.allocate(num_tokens, computes=True)
    one.fill()
    one.rows.bootstrap_room[1, 0] = num_tokens
    sender.init(len(pages), 1)
    half = len(pages) // 2
    if half:
        sender.send(pages[:half], None, num_kv_tokens=half * one.page)
    one.forget()
    sender.send(pages[half:], one.state(), num_kv_tokens=num_tokens - half * one.page)
