"""A small engine that caches sequences: each of its ranks is a source and a target at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from endpoint.fleets import QUICK

from kvferry.discovery.records import InstanceView, RankView
from kvferry.endpoint.config import EndpointConfig
from kvferry.endpoint.incoming import Incoming
from kvferry.endpoint.lookups import PrefixQuery
from kvferry.endpoint.outgoing import Outgoing
from kvferry.endpoint.setup import make_transport
from kvferry.endpoint.source import SourceEndpoint
from kvferry.endpoint.target import TargetEndpoint
from kvferry.layout import Layout, Parallel, attention
from kvferry.prefix import SPAN_TOKENS, PrefixChain, prefix_chain

WAIT_S = 15.0
HEADS, DIM, NUM_LAYERS = 4, 8, 2
SPEC = attention(layers=NUM_LAYERS, kv_heads=HEADS, head_dim=DIM)
MODEL: dict[str, Any] = {"model": "m", "dtype": "bf16"}
CONFIG = EndpointConfig(protocol=QUICK, deadline_s=WAIT_S)


def chain_of(tokens: Sequence[int], **extra: Any) -> PrefixChain:
    return prefix_chain(tokens, **MODEL, **extra)


class CachingRank:
    """One rank: a pool that its source endpoint reads and its target endpoint lets peers write."""

    def __init__(self, layout: Layout, name: str, rank: int, num_pages: int) -> None:
        transport = make_transport("shm")
        self.heads = layout.rank_shards(rank)[0].units
        shape = (NUM_LAYERS, 2, num_pages, layout.page_tokens, len(self.heads), DIM)
        self.kv = transport.allocate(2 * int(np.prod(shape))).view(np.uint16).reshape(shape)
        pools = {"kv": {"k": self.kv[:, 0], "v": self.kv[:, 1]}}
        about: dict[str, Any] = {"name": name, "rank": rank, "model": "m", "config": CONFIG}
        self.target = TargetEndpoint(layout, pools, transport=transport, **about)
        self.source = SourceEndpoint(layout, pools, transport="shm", **about)

    def expected(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the entries of these tokens: layers, K and V, tokens, heads, elements."""
        ids = np.asarray(tokens, np.uint16)[:, None, None] * 64
        heads = np.arange(self.heads.first, self.heads.end, dtype=np.uint16)[:, None] * 8
        one = ids + heads + np.arange(DIM, dtype=np.uint16)
        sides = np.arange(2 * NUM_LAYERS, dtype=np.uint16).reshape(NUM_LAYERS, 2, 1, 1, 1)
        return one[None, None] + sides * 7

    def at(self, pages: Sequence[int], first: int, end: int) -> np.ndarray[Any, Any]:
        """Return the entries of the tokens ``first`` to ``end`` of these pages."""
        kv = self.kv[:, :, pages]
        return kv.reshape(*kv.shape[:2], -1, *kv.shape[4:])[:, :, first:end]

    def compute(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Write the entries of a sequence."""
        size = self.kv.shape[3]
        entries = self.expected(tokens)
        for index, page in enumerate(pages):
            part = entries[:, :, index * size : (index + 1) * size]
            self.kv[:, :, page, : part.shape[2]] = part


class CachingInstance:
    """An instance that caches sequences, answers pulls, and pulls."""

    def __init__(self, name: str, *, tp: int, page: int, answers: bool = True) -> None:
        num_pages = 1024 // page
        self.layout = Layout(SPEC, Parallel(tp=tp), page_tokens=page)
        self.ranks = [CachingRank(self.layout, name, rank, num_pages) for rank in range(tp)]
        self.cached: list[tuple[Sequence[int], PrefixChain, list[int]]] = []
        self.pinned: dict[object, list[Outgoing]] = {}
        self.queries: list[PrefixQuery] = []
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self._free = list(range(num_pages))
        if answers:
            self.ranks[0].source.on_pull(self.hold)

    @property
    def view(self) -> InstanceView:
        records = [rank.source.record for rank in self.ranks]
        lead = records[0]
        ranks = tuple(RankView(one.rank, one.incarnation, one.control) for one in records)
        return InstanceView(lead.instance, "", lead.fingerprint, lead.layout, lead.transport, ranks)

    def pages_for(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.layout.page_tokens)
        pages, self._free = self._free[:count], self._free[count:]
        return pages

    def cache(self, tokens: Sequence[int], **extra: Any) -> None:
        """Compute a sequence and keep it."""
        pages = self.pages_for(len(tokens))
        for rank in self.ranks:
            rank.compute(tokens, pages)
        self.cached.append((tokens, chain_of(tokens, **extra), pages))

    def hold(self, query: PrefixQuery) -> int:
        """Pin the longest prefix of a sequence, and send it from every rank."""
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        self.queries.append(query)
        chains = [chain for _, chain, _ in self.cached]
        found = [(chain.common_tokens(query.chain), n) for n, chain in enumerate(chains)]
        held, number = max(found, default=(0, 0))
        if held <= query.prefix:
            return 0
        _, chain, pages = self.cached[number]
        sends = (self._send(rank, query, held, chain, pages) for rank in self.ranks)
        self.pinned[query.room] = list(sends)
        return held

    def _send(
        self,
        rank: CachingRank,
        query: PrefixQuery,
        held: int,
        chain: PrefixChain,
        pages: list[int],
    ) -> Outgoing:
        out = rank.source.open(query.room, deadline_s=query.deadline_s)
        out.push((0, held), pages[: -(-held // self.layout.page_tokens)])
        out.close(b"held", digest=chain.digest(held))
        return out

    def pull(
        self, room: str, holder: CachingInstance, tokens: Sequence[int], prefix: int = 0
    ) -> tuple[list[Incoming], list[int]]:
        """Ask another instance for a sequence, at every rank."""
        pages = self.pages_for(len(tokens) // SPAN_TOKENS * SPAN_TOKENS)
        asked: dict[str, Any] = {"holder": holder.view, "chain": chain_of(tokens)}
        handles = [r.target.pull(room, prefix=prefix, pages=pages, **asked) for r in self.ranks]
        return handles, pages

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.target.close()
            assert rank.source.close()

    def __enter__(self) -> CachingInstance:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
