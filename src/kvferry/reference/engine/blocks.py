"""Pages and state rows: who has which, and which pages can serve again.

Pure bookkeeping on the driver; no tensor is touched here. A page is in exactly
one of three places: free, in use by one or more requests, or kept (unused, but
its contents are known and may serve a request with the same beginning). Kept
pages are given up least recently used first.

Contents are known by a chain of digests: a full page's key covers its tokens and
the key of the page before it, so equal keys mean equal beginnings.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from kvferry import Misuse


class BlockAllocation:
    """The pages of one request, in token order, and its state row.

    The first ``prefix`` tokens were there already, in pages that it shares.
    """

    def __init__(self, pages: list[int], row: int | None, prefix: int, keys: list[bytes]) -> None:
        self.pages = pages
        self.row = row
        self.prefix = prefix
        self.keys = keys
        self.released = False

    def __repr__(self) -> str:
        return f"<BlockAllocation pages={self.pages} row={self.row} prefix={self.prefix}>"


class Blocks:
    """All pages and rows of an instance; every rank has the same ones."""

    def __init__(
        self, num_pages: int, page_tokens: int, *, num_rows: int = 0, keep: bool = True
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self._num_rows = num_rows
        self._keep = keep
        self._free = deque(range(num_pages))
        self._free_rows = deque(range(num_rows))
        self._users = [0] * num_pages
        # Unused pages with known contents, the least recently used first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Pages that a new request could get."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages that some request has."""
        return self.num_pages - self.num_available

    @property
    def num_used_rows(self) -> int:
        """State rows that some request has."""
        return self._num_rows - len(self._free_rows)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-num_tokens // self.page_tokens)

    def allocate(
        self, prompt: Sequence[int], num_tokens: int, reuse: int
    ) -> BlockAllocation | None:
        """Pages for ``num_tokens``, of which at most the first ``reuse`` may be shared ones.

        None when there are not enough; then nothing has changed.
        """
        keys, shared = self._find(prompt[:reuse])
        num_new = self.pages_for(num_tokens) - len(shared)
        if num_new > self.num_available - sum(page in self._kept for page in shared):
            return None
        if self._num_rows and not self._free_rows:
            return None
        for page in shared:
            self._kept.pop(page, None)
            self._users[page] += 1
        pages = shared + [self._take() for _ in range(num_new)]
        row = self._free_rows.popleft() if self._num_rows else None
        return BlockAllocation(pages, row, len(shared) * self.page_tokens, keys)

    def publish(self, allocation: BlockAllocation, tokens: Sequence[int]) -> None:
        """The contents of these first tokens are in place: let later requests share full pages."""
        if not self._keep:
            return
        known = len(allocation.keys)
        last = allocation.keys[-1] if known else b""
        pages = allocation.pages[known:]
        for page, key in zip(pages, self._chain(tokens, known, last), strict=False):
            allocation.keys.append(key)
            # Someone else's page with the same contents stays the one to share.
            if self._page_of.setdefault(key, page) == page:
                self._key_of[page] = key

    def release(self, allocation: BlockAllocation) -> None:
        """Give everything back, once."""
        if allocation.released:
            raise Misuse("these pages were given back before; release a request once")
        allocation.released = True
        # Backwards, so that the end of a prompt is given up before its beginning.
        for page in reversed(allocation.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)
        if allocation.row is not None:
            self._free_rows.append(allocation.row)

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        used = {page for page, users in enumerate(self._users) if users}
        assert min(self._users, default=0) >= 0
        everywhere = [*self._free, *self._kept, *used]
        assert sorted(everywhere) == list(range(self.num_pages)), everywhere
        assert set(self._kept) <= set(self._key_of)
        assert not set(self._free) & set(self._key_of)
        assert self._page_of == {key: page for page, key in self._key_of.items()}
        assert len(set(self._free_rows)) == len(self._free_rows)

    def _find(self, prompt: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """The longest beginning whose pages are known."""
        keys: list[bytes] = []
        pages: list[int] = []
        for key in self._chain(prompt, 0, b"") if self._keep else ():
            if key not in self._page_of:
                break
            keys.append(key)
            pages.append(self._page_of[key])
        return keys, pages

    def _chain(self, tokens: Sequence[int], first_page: int, last: bytes) -> Iterator[bytes]:
        """The keys of the full pages from ``first_page`` on."""
        size = self.page_tokens
        for start in range(first_page * size, len(tokens) - size + 1, size):
            page = array("q", tokens[start : start + size]).tobytes()
            last = blake2b(last + page, digest_size=16).digest()
            yield last

    def _take(self) -> int:
        """A page to write into: a free one, else the kept one that was used longest ago."""
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._users[page] = 1
        return page
