"""Allocation of cache pages, with prefix caching.

A page is in exactly one of three places: free, in use by one or more requests, or kept
(unused, but with known contents that a request with the same prefix can share). Kept pages
are evicted least recently used first. A full page's key covers its tokens and all before them,
so equal keys mean equal prefixes. Keys come from the digest chain by which instances ask each
other for prefixes (``kvferry.prefix_chain``), so such a question is answered from the same table.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from kvferry import SPAN_TOKENS, Misuse, PrefixChain, prefix_chain, span_digests

ChainOf = Callable[[Sequence[int]], PrefixChain]
UNNAMED: ChainOf = partial(prefix_chain, model="", dtype="")
# Prompts whose chains are remembered: a request that waits for pages is looked up in each step.
RECENT_CHAINS = 8


@dataclass(eq=False, slots=True)
class BlockAllocation:
    """One request's pages in token order; ``prefix`` tokens are shared. ``chain``: its prompt's."""

    pages: list[int]
    prefix: int
    keys: list[bytes]
    chain: PrefixChain
    released: bool = False


@dataclass(frozen=True, slots=True)
class KnownPage:
    """A page whose contents can be shared.

    ``before`` is the key of the page before it. ``spans`` are the short digests of the chain's
    spans that end in the page.
    """

    key: bytes
    before: bytes
    spans: tuple[bytes, ...]


class Blocks:
    """All pages of an instance; every rank has the same numbers."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        *,
        keep: bool = True,
        chain_of: ChainOf = UNNAMED,
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.keep = keep
        self.chain_of: ChainOf = lru_cache(RECENT_CHAINS)(chain_of)
        self._free = deque(range(num_pages))
        self._users = [0] * num_pages
        # Unused pages with known contents, the least recently used first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._known: dict[int, KnownPage] = {}
        self._page_of: dict[bytes, int] = {}
        # A page in which a span ends, and the span's full digest, by its short digest.
        self._spans: dict[bytes, tuple[int, bytes]] = {}

    @property
    def num_available(self) -> int:
        """Pages that a new request can get."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages in use by requests."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-num_tokens // self.page_tokens)

    def allocate(
        self, prompt: Sequence[int], num_tokens: int, reuse: int
    ) -> BlockAllocation | None:
        """Allocate pages for ``num_tokens``; only the first ``reuse`` tokens may be shared.

        Return None, with nothing changed, if there are not enough pages.
        """
        prompt = tuple(prompt)
        chain = self.chain_of(prompt if self.keep else ())
        keys, shared = self._find(prompt[:reuse], chain)
        num_new = self.pages_for(num_tokens) - len(shared)
        if num_new > self.num_available - sum(page in self._kept for page in shared):
            return None
        self._use(shared)
        pages = shared + [self._take() for _ in range(num_new)]
        return BlockAllocation(pages, len(shared) * self.page_tokens, keys, chain)

    def hold(self, asked: bytes) -> tuple[BlockAllocation, bytes]:
        """Share the pages of the longest prefix of a short chain, and return its digest too."""
        pages: list[int] = []
        held, digest = 0, b""
        for number, short in enumerate(span_digests(asked), 1):
            if short not in self._spans:
                continue
            page, full = self._spans[short]
            # A page that is only partly held may be another sequence's, and differ behind that.
            known = pages[: held // self.page_tokens]
            rest = self._back_from(page, self.pages_for(number * SPAN_TOKENS) - len(known))
            if rest is not None:
                pages, held, digest = known + rest, number * SPAN_TOKENS, full
        self._use(pages)
        return BlockAllocation(pages, held, [], self.chain_of(())), digest

    def publish(self, allocation: BlockAllocation, tokens: Sequence[int]) -> None:
        """Make full pages of these first tokens, whose entries are written, shareable."""
        keys, size = allocation.keys, self.page_tokens
        if not self.keep or len(tokens) // size <= len(keys):
            return
        if allocation.chain.num_tokens < len(tokens) - len(tokens) % SPAN_TOKENS:
            allocation.chain = self.chain_of(tuple(tokens))
        chain, shorts = allocation.chain, span_digests(allocation.chain.short)
        for number in range(len(keys), len(tokens) // size):
            first, end, page = number * size, (number + 1) * size, allocation.pages[number]
            key, before = _key(chain, tokens, end), keys[-1] if keys else b""
            keys.append(key)
            # If another page has the same contents, that one stays the shared one.
            if self._page_of.setdefault(key, page) == page:
                spans = range(first // SPAN_TOKENS, end // SPAN_TOKENS)
                self._known[page] = KnownPage(key, before, tuple(shorts[span] for span in spans))
                for span in spans:
                    self._spans[shorts[span]] = page, chain.digest((span + 1) * SPAN_TOKENS)

    def release(self, allocation: BlockAllocation) -> None:
        """Give back the pages of a request, once."""
        if allocation.released:
            raise Misuse("these pages were given back before; release a request once")
        allocation.released = True
        # Backwards, so that the end of a prompt is evicted before its beginning.
        for page in reversed(allocation.pages):
            self._users[page] -= 1
            if not self._users[page] and page in self._known:
                self._kept[page] = None
            elif not self._users[page]:
                self._free.append(page)

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        used = [page for page, users in enumerate(self._users) if users]
        assert sorted([*self._free, *self._kept, *used]) == list(range(self.num_pages))
        assert min(self._users, default=0) >= 0
        assert set(self._kept) <= set(self._known)
        assert not set(self._free) & set(self._known)
        assert self._page_of == {known.key: page for page, known in self._known.items()}
        for short, (page, digest) in self._spans.items():
            assert short in self._known[page].spans
            assert digest.startswith(short)

    def _find(self, prompt: Sequence[int], chain: PrefixChain) -> tuple[list[bytes], list[int]]:
        """Return keys and pages of the longest known prefix."""
        keys: list[bytes] = []
        if self.keep:
            for end in range(self.page_tokens, len(prompt) + 1, self.page_tokens):
                key = _key(chain, prompt, end)
                if key not in self._page_of:
                    break
                keys.append(key)
        return keys, [self._page_of[key] for key in keys]

    def _back_from(self, page: int, number: int) -> list[int] | None:
        """Return ``number`` pages that end with this one; None if one of them is gone."""
        pages = [page]
        while len(pages) < number:
            before = self._page_of.get(self._known[pages[-1]].before)
            if before is None:
                return None
            pages.append(before)
        return pages[::-1]

    def _use(self, shared: Sequence[int]) -> None:
        for page in shared:
            self._kept.pop(page, None)
            self._users[page] += 1

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._kept.popitem(last=False)
            known = self._known.pop(page)
            del self._page_of[known.key]
            for short in known.spans:
                # Another page that begins alike may have the entry.
                if self._spans.get(short, (None,))[0] == page:
                    del self._spans[short]
        self._users[page] = 1
        return page


def _key(chain: PrefixChain, tokens: Sequence[int], end: int) -> bytes:
    """Return the key of the page that ends at ``end``: the last span's digest, and the rest."""
    whole = end - end % SPAN_TOKENS
    return (chain.digest(whole) if whole else b"") + array("q", tokens[whole:end]).tobytes()
