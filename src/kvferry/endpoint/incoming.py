"""A room at its target, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.discovery.records import InstanceView
from kvferry.endpoint.handles import Handle
from kvferry.ids import Op, Peer
from kvferry.layout.layout import Layout, find_shard
from kvferry.layout.pages import local_pages
from kvferry.plan.plan import Block
from kvferry.protocol.events import ReceiveRequest
from kvferry.protocol.messages import PageTableMessage
from kvferry.protocol.outcome import Done


class Incoming(Handle):
    """One room of one rank."""

    def __init__(
        self,
        wanted: ReceiveRequest,
        prefill: str | InstanceView,
        abort: Callable[[Incoming], None],
        everything: Callable[[], dict[str, list[int]]],
    ) -> None:
        super().__init__(wanted.room, wanted.deadline)
        self._abort = abort
        self._everything = everything
        self.wanted = wanted
        # By name, or as the engine knows it.
        self.prefill = prefill
        self._bad: dict[str, list[int]] | None = None
        # The owner's: the last scatter of what each source has sent.
        self.latest: dict[Peer, Op] = {}

    @property
    def num_pages(self) -> int:
        """Pages that are held for the room, of the group that has most."""
        return max((len(table.pages) for table in self.wanted.tables), default=0)

    @property
    def bad_pages(self) -> dict[str, list[int]]:
        """After a failure, what must not be used: all that was asked for, unless more is known."""
        if self.failure is None:
            return {}
        return self._everything() if self._bad is None else self._bad

    def know_bad(self, pages: dict[str, list[int]]) -> None:
        """For the owner, before the end: just these pages lack something."""
        self._bad = pages

    @property
    def metadata(self) -> bytes:
        """What the lead source said at the close; empty before the end."""
        outcome = self.outcome
        return outcome.metadata if isinstance(outcome, Done) else b""

    def abort(self) -> None:
        """Give the room up. Its pages stay held until ``released``."""
        self._abort(self)


def wanted_pages(layout: Layout, rank: int, wanted: ReceiveRequest) -> dict[str, list[int]]:
    """Per group, every page that was to be written: those behind the prefix."""
    tokens, prefix = wanted.request.num_tokens, wanted.request.prefix
    owed = [
        Block(held.group, held.layers, layout.spec.group(held.group).owed(tokens, prefix))
        for held in layout.rank_shards(rank)
    ]
    return bad_pages(layout, rank, wanted.tables, [block for block in owed if len(block.tokens)])


def bad_pages(
    layout: Layout, rank: int, tables: tuple[PageTableMessage, ...], missing: list[Block]
) -> dict[str, list[int]]:
    """Per group, the pages that lack something, in the order of their tokens."""
    shards = layout.rank_shards(rank)
    by_group = {table.group: table for table in tables}
    places: dict[str, set[int]] = {}
    for block in missing:
        first = by_group[block.group].first_page
        group = layout.spec.group(block.group)
        held = find_shard(shards, block.group, group.layers_in(block.layers)[0])
        lacking = local_pages(layout, group, held, block.tokens)
        places.setdefault(block.group, set()).update(
            page - first for page in range(lacking.first, lacking.end)
        )
    return {
        group: [by_group[group].pages[place] for place in sorted(bad)]
        for group, bad in places.items()
        if bad
    }
