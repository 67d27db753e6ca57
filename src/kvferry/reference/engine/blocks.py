"""Allocation of cache pages, with prefix caching.

A page is in exactly one of three places: free, in use by one or more requests, or kept
(unused, but with known contents that a request with the same prefix can share). Kept pages
are evicted least recently used first. A full page's key is a digest of its tokens and the
key of the page before it, so equal keys mean equal prefixes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvferry import Misuse


@dataclass(eq=False, slots=True)
class BlockAllocation:
    """One request's pages in token order; ``prefix`` tokens are shared."""

    pages: list[int]
    prefix: int
    keys: list[bytes]
    released: bool = False


class Blocks:
    """All pages of an instance; every rank has the same numbers."""

    def __init__(self, num_pages: int, page_tokens: int, *, keep: bool = True) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self._keep = keep
        self._free = deque(range(num_pages))
        self._users = [0] * num_pages
        # Unused pages with known contents, the least recently used first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

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
        keys, shared = self._find(prompt[:reuse])
        num_new = self.pages_for(num_tokens) - len(shared)
        if num_new > self.num_available - sum(page in self._kept for page in shared):
            return None
        for page in shared:
            self._kept.pop(page, None)
            self._users[page] += 1
        pages = shared + [self._take() for _ in range(num_new)]
        return BlockAllocation(pages, len(shared) * self.page_tokens, keys)

    def publish(self, allocation: BlockAllocation, tokens: Sequence[int]) -> None:
        """Make full pages of these first tokens, whose entries are written, shareable."""
        if not self._keep:
            return
        known = len(allocation.keys)
        last = allocation.keys[-1] if known else b""
        pages = allocation.pages[known:]
        for page, key in zip(pages, self._chain(tokens, known, last), strict=False):
            allocation.keys.append(key)
            # If another page has the same contents, that one stays the shared one.
            if self._page_of.setdefault(key, page) == page:
                self._key_of[page] = key

    def release(self, allocation: BlockAllocation) -> None:
        """Give back the pages of a request, once."""
        if allocation.released:
            raise Misuse("these pages were given back before; release a request once")
        allocation.released = True
        # Backwards, so that the end of a prompt is evicted before its beginning.
        for page in reversed(allocation.pages):
            self._users[page] -= 1
            if not self._users[page] and page in self._key_of:
                self._kept[page] = None
            elif not self._users[page]:
                self._free.append(page)

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        used = [page for page, users in enumerate(self._users) if users]
        assert sorted([*self._free, *self._kept, *used]) == list(range(self.num_pages))
        assert min(self._users, default=0) >= 0
        assert set(self._kept) <= set(self._key_of)
        assert not set(self._free) & set(self._key_of)
        assert self._page_of == {key: page for page, key in self._key_of.items()}

    def _find(self, prompt: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return keys and pages of the longest known prefix."""
        keys: list[bytes] = []
        for key in self._chain(prompt, 0, b"") if self._keep else ():
            if key not in self._page_of:
                break
            keys.append(key)
        return keys, [self._page_of[key] for key in keys]

    def _chain(self, tokens: Sequence[int], first_page: int, last: bytes) -> Iterator[bytes]:
        """Yield the keys of the full pages from ``first_page`` on."""
        size = self.page_tokens
        for start in range(first_page * size, len(tokens) - size + 1, size):
            page = array("q", tokens[start : start + size]).tobytes()
            last = blake2b(last + page, digest_size=16).digest()
            yield last

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page
