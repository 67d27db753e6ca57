"""Handle of a room at its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.handles import Handle
from kvferry.ids import Op, Peer
from kvferry.layout.layout import Layout, find_shard
from kvferry.layout.pages import local_pages
from kvferry.plan.plan import Block, Request
from kvferry.protocol.events import ReceiveRequest
from kvferry.protocol.messages import PageTableMessage
from kvferry.protocol.outcome import Done


class Incoming(Handle):
    """One room at one decode rank: a transfer into this rank's pages. For any thread.

    ``TargetEndpoint.receive`` makes it. See ``Handle`` for how to learn of its end.
    """

    def __init__(
        self,
        request: ReceiveRequest,
        prefill: str | InstanceView,
        layout: Layout,
        rank: int,
        abort: Callable[[Incoming], None],
    ) -> None:
        super().__init__(request.room, request.deadline, abort)
        self.request = request
        self.held_tokens = request.request.num_tokens - request.request.prefix
        # The instance's name, or the view that the engine gave.
        self.prefill = prefill
        self._layout = layout
        self._rank = rank
        # For the loop thread: each source's last scatter.
        self.last_scatter: dict[Peer, Op] = {}

    @property
    def page_counts(self) -> Mapping[str, int]:
        """Number of pages held for the room, by group."""
        return {table.group: len(table.pages) for table in self.request.tables}

    @property
    def bad_pages(self) -> dict[str, list[int]]:
        """Pages per group that must not be used after a failure; empty if the room did not fail.

        All requested pages, unless the endpoint knows which of them lack data.
        """
        if self.failure is None:
            return {}
        blocks: Iterable[Block] | None = self.unusable
        if blocks is None:
            blocks = requested_blocks(self._layout, self._rank, self.request.request)
        return pages_of(self._layout, self._rank, self.request.tables, blocks)

    @property
    def num_tokens(self) -> int:
        """First tokens of the request that are in its pages, with its prefix; 0 before it is done.

        Less than asked for after a pull whose holder had less.
        """
        outcome = self.outcome
        if not isinstance(outcome, Done):
            return 0
        return self.request.request.num_tokens if outcome.pulled is None else outcome.pulled

    @property
    def metadata(self) -> bytes:
        """Metadata that the lead source passed to ``close``; empty before the room is done."""
        outcome = self.outcome
        return outcome.metadata if isinstance(outcome, Done) else b""


def requested_blocks(layout: Layout, rank: int, request: Request) -> list[Block]:
    """Return every block to be written, which excludes the cached prefix."""
    tokens, prefix = request.num_tokens, request.prefix
    owed = (
        Block(shard.group, shard.layers, layout.spec.group(shard.group).owed(tokens, prefix))
        for shard in layout.rank_shards(rank)
    )
    return [block for block in owed if len(block.tokens)]


def pages_of(
    layout: Layout, rank: int, tables: tuple[PageTableMessage, ...], blocks: Iterable[Block]
) -> dict[str, list[int]]:
    """Return per group the pages that hold any of the blocks, in token order."""
    shards = layout.rank_shards(rank)
    by_group = {table.group: table for table in tables}
    indices: dict[str, set[int]] = {}
    for block in blocks:
        first = by_group[block.group].first_page
        group = layout.spec.group(block.group)
        shard = find_shard(shards, block.group, group.layers_in(block.layers)[0])
        pages = local_pages(layout, group, shard, block.tokens)
        indices.setdefault(block.group, set()).update(
            page - first for page in range(pages.first, pages.end)
        )
    return {
        group: [by_group[group].pages[index] for index in sorted(found)]
        for group, found in indices.items()
        if found
    }
