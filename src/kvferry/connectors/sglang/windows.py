"""The pages of sliding-window layers, which SGLang names with the last chunk only.

SGLang keeps them in a pool of its own, for the last tokens of a request. What it calls a window
may be a token less than what the model's configuration says and the layout goes by, so that its
list may lack a page in front: nobody looks at the token in it, and SGLang's page 0, which is never
given to a request, stands for it.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import InputError, Span, touched_pages
from kvferry.connectors.sglang.pools import WindowPool

NO_PAGE = 0


def demand_covered(window: WindowPool | None, used: int | None) -> None:
    """Refuse where SGLang looks further back than the layout says."""
    if window is not None and used is not None and used > window.num_tokens:
        raise InputError(
            f"SGLang uses a window of {used} tokens, and the model's configuration has "
            f"{window.num_tokens}; this model is not supported"
        )


def first_kept(window: WindowPool, num_tokens: int, prefix: int = 0) -> int:
    """The first token of the first page that a request's window touches behind a prefix."""
    page = window.buffers.page_tokens
    first = min(max(num_tokens - window.num_tokens, prefix), num_tokens)
    return first // page * page


def window_pages(
    window: WindowPool, pages: Sequence[int], num_tokens: int, prefix: int = 0
) -> list[int]:
    """SGLang's list, from the first page that the layout counts."""
    if prefix >= num_tokens:
        return []
    kept = Span(first_kept(window, num_tokens, prefix), num_tokens)
    needed = len(touched_pages(kept, window.buffers.page_tokens))
    if not needed - 1 <= len(pages) <= needed:
        raise InputError(
            f"SGLang named {len(pages)} pages of its sliding window, and {num_tokens} tokens with "
            f"a window of {window.num_tokens} need {needed}; this model is not supported"
        )
    return [NO_PAGE] * (needed - len(pages)) + list(pages)
