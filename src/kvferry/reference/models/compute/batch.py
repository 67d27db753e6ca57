"""A step's work as tensors: built once, used by every layer.

Requests that run a single token (all that are decoding) attend together with
others of about their length, padded to the longest; chunks of prompts attend one
by one. Everything else treats all tokens of the step alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.reference.engine.steps import RequestWork

# Requests attend together while they have no more tokens than this, padding included.
MAX_PADDED_TOKENS = 16384


class Singles(NamedTuple):
    """One token of each of several requests: where it is in the step, pages, who sees what."""

    places: Tensor
    pages: Tensor
    mask: Tensor


class Chunk(NamedTuple):
    """Several tokens of one request."""

    rows: slice
    pages: Tensor
    mask: Tensor


class Run(NamedTuple):
    """One request's tokens in the step, for layers that carry a state from row to row."""

    rows: slice
    is_first: bool
    state_row: int


class StepBatch(NamedTuple):
    """All tokens of a step, one after the other."""

    tokens: Tensor
    positions: Tensor
    page: Tensor
    offset: Tensor
    singles: list[Singles]
    chunks: list[Chunk]
    runs: list[Run]
    # The places in the step whose logits are wanted.
    wanted: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return self.tokens.shape[0]


def make_batch(works: Sequence[RequestWork], page_tokens: int, device: torch.device) -> StepBatch:
    """The tensors of a step that has at least one token."""
    begins = [0]
    for work in works:
        begins.append(begins[-1] + len(work.tokens))
    positions = [position for work in works for position in range(work.first, work.end)]
    places = [
        work.pages[position // page_tokens]
        for work in works
        for position in range(work.first, work.end)
    ]
    position = torch.tensor(positions, device=device)
    return StepBatch(
        tokens=torch.tensor([token for work in works for token in work.tokens], device=device),
        positions=position,
        page=torch.tensor(places, device=device),
        offset=position % page_tokens,
        singles=[
            _singles(group, page_tokens, device) for group in _alike(works, begins, page_tokens)
        ],
        chunks=[
            _chunk(work, begin, page_tokens, device)
            for work, begin in zip(works, begins, strict=False)
            if len(work.tokens) > 1
        ],
        runs=[
            Run(slice(begin, begin + len(work.tokens)), work.first == 0, work.row)
            for work, begin in zip(works, begins, strict=False)
            if work.row is not None
        ],
        wanted=torch.tensor(
            [end - 1 for work, end in zip(works, begins[1:], strict=True) if work.sampling],
            dtype=torch.long,
            device=device,
        ),
    )


def _num_pages(work: RequestWork, page_tokens: int) -> int:
    return -(-work.end // page_tokens)


def _alike(
    works: Sequence[RequestWork], begins: Sequence[int], page_tokens: int
) -> Iterator[list[tuple[RequestWork, int]]]:
    """Works of a single token and where each begins, in groups that waste less than half."""
    mine = [
        (work, begin) for work, begin in zip(works, begins, strict=False) if len(work.tokens) == 1
    ]
    mine.sort(key=lambda one: one[0].end)
    while mine:
        longest = _num_pages(mine[-1][0], page_tokens)
        most = max(1, MAX_PADDED_TOKENS // (longest * page_tokens))
        group = [one for one in mine if 2 * _num_pages(one[0], page_tokens) > longest][-most:]
        yield group
        del mine[-len(group) :]


def _singles(
    group: Sequence[tuple[RequestWork, int]], page_tokens: int, device: torch.device
) -> Singles:
    """Page tables padded with page 0, which the mask hides."""
    longest = max(_num_pages(work, page_tokens) for work, _ in group)
    table = torch.zeros(len(group), longest, dtype=torch.long)
    for i, (work, _) in enumerate(group):
        used = work.pages[: _num_pages(work, page_tokens)]
        table[i, : len(used)] = torch.tensor(used)
    ends = torch.tensor([work.end for work, _ in group])
    seen = torch.arange(longest * page_tokens) < ends[:, None]
    places = torch.tensor([begin for _, begin in group])
    return Singles(places.to(device), table.to(device), seen[:, None, None, :].to(device))


def _chunk(work: RequestWork, begin: int, page_tokens: int, device: torch.device) -> Chunk:
    num_pages = _num_pages(work, page_tokens)
    query = torch.arange(work.first, work.end, device=device)
    key = torch.arange(num_pages * page_tokens, device=device)
    return Chunk(
        rows=slice(begin, begin + len(work.tokens)),
        pages=torch.tensor(work.pages[:num_pages], device=device),
        mask=key <= query[:, None],
    )
