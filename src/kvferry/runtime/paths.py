"""Which blocks go through staging: the chooser, asked with a room's own pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.errors import InputError
from kvferry.ids import Room
from kvferry.plan.bind import Pair, Side, bind
from kvferry.plan.choose import Constants, Path, choose, shape_of
from kvferry.plan.places import PageTable, PoolMap
from kvferry.plan.plan import Block
from kvferry.protocol.lanes import Lane


class PathPolicy:
    """A staging policy with what it costs here. ``constants`` may change as they are measured."""

    def __init__(
        self,
        rank: int,
        pools: PoolMap,
        tables_of: Callable[[Room], Mapping[str, PageTable]],
        constants: Constants,
        override: Path | None = None,
    ) -> None:
        self._rank = rank
        self._pools = pools
        self._tables_of = tables_of
        self._override = override
        self.constants = constants

    def __call__(self, lane: Lane, block: Block) -> bool:
        """Whether a block of a lane is staged."""
        if self.constants.maps_peer:
            return False
        if self._override is not None:
            return self._override is Path.STAGED
        try:
            return self._choose(lane, block) is Path.STAGED
        except InputError:
            # Its pages are not all known yet, or wrong; writing it will tell.
            return False

    def _choose(self, lane: Lane, block: Block) -> Path:
        hello = lane.link.hello
        assert hello is not None
        theirs = {table.group: table.as_page_table() for table in lane.tables}
        binding = bind(
            lane.link.plan,
            Pair(self._rank, lane.peer.rank),
            lane.request,
            Side(self._pools, dict(self._tables_of(lane.room.name))),
            Side(hello.pools, theirs),
            [block],
        )
        return choose(shape_of(binding), self.constants).path
