"""Sliding windows: their pages, and that only those are written."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from connectors.sglang.schedulers import (
    SchedulerRows,
    buffers_of,
    new_pool,
    request,
    settings_of,
    until,
)

from kvferry import DiscoveryServer, DType, InputError, Status, make_transport
from kvferry.connectors.sglang.geometry import head_span
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.managers import DecodeManager, PrefillManager, RoomFailed
from kvferry.connectors.sglang.pools import Buffers, KvHeads, RankPosition, SglangCache, WindowPool
from kvferry.connectors.sglang.receiver import RoomReceiver
from kvferry.connectors.sglang.sender import RoomSender
from kvferry.connectors.sglang.windows import (
    check_window,
    first_kept,
    window_pages,
)

DIM, HEADS, SLOTS, KEPT = 4, 2, 64, 8
FULL, SLIDING = (1, 3), (0, 2)


def pool_of(page: int, num_tokens: int = KEPT) -> WindowPool:
    buffers = Buffers(
        addresses=[], lengths=[], page_lengths=[], layers=(), page_tokens=page, dtype=DType.FLOAT32
    )
    return WindowPool(num_tokens=num_tokens, layers=buffers.layers, buffers=buffers)


@pytest.mark.parametrize(
    ("page", "num_tokens", "prefix", "first"),
    [(4, 6, 0, 0), (4, 8, 0, 0), (4, 9, 0, 0), (4, 12, 0, 4), (1, 9, 0, 1), (4, 20, 17, 16)],
)
def test_first_token_of_the_window(page: int, num_tokens: int, prefix: int, first: int) -> None:
    assert first_kept(pool_of(page), num_tokens, prefix) == first


def test_page_0_replaces_a_missing_first_page() -> None:
    """With 7 tokens in SGLang's words and 8 in ours, 12 tokens begin at 5 or at 4."""
    assert window_pages(pool_of(1), [5, 6, 7, 8, 9, 10, 11], 12) == [0, 5, 6, 7, 8, 9, 10, 11]
    assert window_pages(pool_of(4), [7, 8], 12) == [7, 8]
    assert window_pages(pool_of(4), [], 12, prefix=12) == []
    for strange in ([], [6, 7, 8]):
        with pytest.raises(InputError, match="12 tokens with a window of 8 need 2"):
            window_pages(pool_of(4), strange, 12)


def test_a_longer_window_than_configured_is_rejected() -> None:
    for used in (None, 7, 8):
        check_window(pool_of(4), used)
    check_window(None, 9)
    with pytest.raises(InputError, match="a window of 9 tokens, but the model's configuration has"):
        check_window(pool_of(4), 9)


class Rank:
    """Two pools, each with K and V of two layers, and metadata rows."""

    def __init__(self, kind: Any, tp: int, rank: int, page: int, url: str | None) -> None:
        transport, self.page = make_transport("shm"), page
        heads = KvHeads(total=HEADS, k_dim=DIM, v_dim=DIM)
        self.span = head_span(heads, tp, rank)
        shape = (SLOTS, len(self.span), DIM)
        self.full, self.sliding = (
            [new_pool(transport, *shape) for _ in range(4)] for _ in range(2)
        )
        self.rows = SchedulerRows()
        cache = SglangCache(
            num_layers=4,
            layers=FULL,
            stages=(4,),
            position=RankPosition(tp=tp, tp_rank=rank),
            heads=heads,
            buffers=buffers_of(self.full, FULL, page),
            window=WindowPool(
                num_tokens=KEPT, layers=SLIDING, buffers=buffers_of(self.sliding, SLIDING, page)
            ),
        )
        replica = Replica(kind.__name__, 0, 1)
        settings = settings_of(cache, self.rows, replica, transport, discovery=url)
        self.manager = kind(SimpleNamespace(), settings)

    def fill(self, pools: list[Any], pages: list[int], first: int, num_tokens: int) -> None:
        """Every value says which buffer, token and head it is of."""
        for buffer, pool in enumerate(pools):
            for token in range(first, num_tokens):
                for place, head in enumerate(range(self.span.first, self.span.end)):
                    pool[self._slot(pages, first, token), place] = said(buffer, token, head)

    def wrong(self, pools: list[Any], pages: list[int], first: int, num_tokens: int) -> int:
        return sum(
            not (pool[self._slot(pages, first, token), head] == said(buffer, token, head)).all()
            for buffer, pool in enumerate(pools)
            for token in range(first, num_tokens)
            for head in range(HEADS)
        )

    def _slot(self, pages: list[int], first: int, token: int) -> int:
        place = token - first // self.page * self.page
        return pages[place // self.page] * self.page + place % self.page


def said(buffer: int, token: int, head: int) -> float:
    return 1 + head + 10 * token + 10_000 * buffer


@pytest.mark.parametrize("num_tokens", [5, 8, 22, 24])
@pytest.mark.parametrize("used", [KEPT, KEPT - 1], ids=["inclusive", "exclusive"])
def test_windows_carry_their_last_tokens_and_other_layers_all(num_tokens: int, used: int) -> None:
    """TP2 in pages of 1 to TP1 in pages of 4, in chunks of 4 tokens."""
    with ExitStack() as stack:
        server = stack.enter_context(DiscoveryServer())
        address = server.url.removeprefix("http://")
        sources = [Rank(PrefillManager, 2, rank, 1, server.url) for rank in range(2)]
        target = Rank(DecodeManager, 1, 0, 4, None)
        for rank in (*sources, target):
            stack.callback(rank.manager.endpoint.close)
        until(lambda: target.manager.try_ensure_parallel_info(address))
        asked = request(num_tokens)
        receiver = RoomReceiver(target.manager, address, 9)
        receiver.init(0)
        receiver.bind_request(asked, used)
        # As SGLang would: from the page in which its own window begins.
        begins = max(0, num_tokens - used)
        into = [list(range(9, 9 - -(-num_tokens // 4), -1)), list(range(15, 15 - 4, -1))]
        into[1] = into[1][: -(-num_tokens // 4) - begins // 4]
        receiver.send_metadata(into[0], 1, [np.array(into[1])], decode_prefix_len=0)
        pages, kept = list(range(1, num_tokens + 1)), list(range(40, 40 + num_tokens - begins))
        for rank in sources:
            rank.fill(rank.full, pages, 0, num_tokens)
            rank.fill(rank.sliding, kept, begins, num_tokens)
            rank.rows.rooms[1, 0] = 9
            sender = RoomSender(rank.manager, "", 9)
            sender.bind_request(asked, used)
            sender.init(num_tokens, 1)
            for first in range(0, num_tokens, 4):
                end = min(first + 4, num_tokens)
                state = [np.array(kept)] if end == num_tokens else None
                sender.send(pages[first:end], state, num_kv_tokens=end - first)
        until(lambda: receiver.poll() in (Status.DONE, Status.FAILED))
        assert receiver.poll() == Status.DONE
        assert wrong_in(target, into, begins, num_tokens) == 0


def wrong_in(target: Rank, pages: list[list[int]], begins: int, num_tokens: int) -> int:
    return target.wrong(target.full, pages[0], 0, num_tokens) + target.wrong(
        target.sliding, pages[1], begins, num_tokens
    )


def test_a_window_that_is_too_long_fails_the_room() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(DiscoveryServer())
        source = Rank(PrefillManager, 1, 0, 1, server.url)
        target = Rank(DecodeManager, 1, 0, 4, None)
        for rank in (source, target):
            stack.callback(rank.manager.endpoint.close)
        asked = request(1)
        ends: list[Any] = [
            RoomSender(source.manager, "", 9),
            RoomReceiver(target.manager, "127.0.0.1:1", 9),
        ]
        for end in ends:
            end.bind_request(asked, KEPT + 1)
            assert end.poll() == Status.FAILED
            with pytest.raises(RoomFailed, match="a window of 9 tokens"):
                end.failure_exception()
