"""The tensors of one step, built once and used by every layer.

Requests that run a single token (all that decode) attend in groups of similar length, padded
to the longest; chunks of prompts attend one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.reference.engine.requests import RequestWork

# Padded tokens of one group of decoding requests, at most.
MAX_PADDED_TOKENS = 16384


class Singles(NamedTuple):
    """One token each of several requests: rows in the step, page tables, attention mask."""

    rows: Tensor
    pages: Tensor
    mask: Tensor


class Chunk(NamedTuple):
    """Several tokens of one request."""

    rows: slice
    pages: Tensor
    mask: Tensor


class StateRun(NamedTuple):
    """One request's tokens in the step, for layers with a recurrent state."""

    rows: slice
    is_first: bool
    state_row: int


class StepBatch(NamedTuple):
    """All tokens of a step, and the rows whose logits are wanted."""

    tokens: Tensor
    positions: Tensor
    page: Tensor
    offset: Tensor
    singles: list[Singles]
    chunks: list[Chunk]
    runs: list[StateRun]
    wanted: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return self.tokens.shape[0]


class _Placed(NamedTuple):
    """A request's work and its rows in the step."""

    work: RequestWork
    rows: slice
    num_pages: int


def make_batch(works: Sequence[RequestWork], page_tokens: int, device: torch.device) -> StepBatch:
    """Return the tensors of a step that has at least one token."""
    placed, begin = [], 0
    for work in works:
        rows = slice(begin, begin + len(work.tokens))
        placed.append(_Placed(work, rows, -(-work.end // page_tokens)))
        begin = rows.stop
    positions = [(work, at) for work in works for at in range(work.first, work.end)]
    position = torch.tensor([at for _, at in positions], device=device)
    return StepBatch(
        tokens=torch.tensor([token for work in works for token in work.tokens], device=device),
        positions=position,
        page=torch.tensor([work.pages[at // page_tokens] for work, at in positions], device=device),
        offset=position % page_tokens,
        singles=[_singles(group, page_tokens, device) for group in _groups(placed, page_tokens)],
        chunks=[_chunk(one, page_tokens, device) for one in placed if len(one.work.tokens) > 1],
        runs=[
            StateRun(rows, work.first == 0, work.row)
            for work, rows, _ in placed
            if work.row is not None
        ],
        wanted=torch.tensor(
            [rows.stop - 1 for work, rows, _ in placed if work.sampling],
            dtype=torch.long,
            device=device,
        ),
    )


def _groups(placed: Sequence[_Placed], page_tokens: int) -> Iterator[list[_Placed]]:
    """Yield works of a single token in groups whose padding is less than half."""
    mine = sorted((one for one in placed if len(one.work.tokens) == 1), key=lambda o: o.work.end)
    while mine:
        longest = mine[-1].num_pages
        most = max(1, MAX_PADDED_TOKENS // (longest * page_tokens))
        group = [one for one in mine if 2 * one.num_pages > longest][-most:]
        yield group
        del mine[-len(group) :]


def _singles(group: Sequence[_Placed], page_tokens: int, device: torch.device) -> Singles:
    """Pad page tables with page 0, which the mask hides."""
    longest = max(one.num_pages for one in group)
    table = torch.zeros(len(group), longest, dtype=torch.long)
    for i, one in enumerate(group):
        table[i, : one.num_pages] = torch.tensor(one.work.pages[: one.num_pages])
    ends = torch.tensor([one.work.end for one in group])
    seen = torch.arange(longest * page_tokens) < ends[:, None]
    rows = torch.tensor([one.rows.start for one in group])
    return Singles(rows.to(device), table.to(device), seen[:, None, None, :].to(device))


def _chunk(one: _Placed, page_tokens: int, device: torch.device) -> Chunk:
    query = torch.arange(one.work.first, one.work.end, device=device)
    key = torch.arange(one.num_pages * page_tokens, device=device)
    pages = torch.tensor(one.work.pages[: one.num_pages], device=device)
    return Chunk(one.rows, pages, mask=key <= query[:, None])
