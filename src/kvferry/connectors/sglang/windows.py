"""Pages of sliding-window layers, which SGLang lists with the last chunk only. Pure.

SGLang keeps the last tokens of these layers in a pool of their own. Its window may be one token
shorter than the model's configuration, which the layout uses, so its list may lack the first page.
No query attends to that page's token; SGLang's page 0, which no request uses, takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import InputError, Span, touched_pages
from kvferry.connectors.sglang.pools import WindowPool

NO_PAGE = 0


def check_window(window: WindowPool | None, used: int | None) -> None:
    """Raise ``InputError`` if SGLang's window is longer than the layout's."""
    if window is not None and used is not None and used > window.num_tokens:
        raise InputError(
            f"SGLang uses a window of {used} tokens, but the model's configuration has "
            f"{window.num_tokens}; this model is not supported"
        )


def first_kept(window: WindowPool, num_tokens: int, prefix: int = 0) -> int:
    """Return the first token of the first page that the window touches after the prefix."""
    page = window.buffers.page_tokens
    first = min(max(num_tokens - window.num_tokens, prefix), num_tokens)
    return first // page * page


def window_pages(
    window: WindowPool, pages: Sequence[int], num_tokens: int, prefix: int = 0
) -> list[int]:
    """Return SGLang's list of pages, completed to the first page of the layout's window."""
    if prefix >= num_tokens:
        return []
    kept = Span(first_kept(window, num_tokens, prefix), num_tokens)
    needed = len(touched_pages(kept, window.buffers.page_tokens))
    if not needed - 1 <= len(pages) <= needed:
        raise InputError(
            f"SGLang listed {len(pages)} pages of its sliding window, but {num_tokens} tokens with "
            f"a window of {window.num_tokens} need {needed}; this model is not supported"
        )
    return [NO_PAGE] * (needed - len(pages)) + list(pages)
