"""The chooser of a source: which blocks go through staging, and what each of them copies.

A chunk is bound once: what was bound to choose its mode is written with the same binding, and
what of it comes layer by layer is cut out of it. A block of a few layers is looked at as what
it is: it may go another way than the whole chunk would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.outgoing import Outgoing
from kvferry.errors import InputError
from kvferry.ids import Room
from kvferry.plan.bind import Binding, BindingTemplate, RankPair, Tables
from kvferry.plan.binding_cache import BindingCache, PairPools
from kvferry.plan.choose import TransferMode, choose, shape_of
from kvferry.plan.cost import LinkCostTable
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block
from kvferry.protocol.events import TransferRequest, Write


class Chooser:
    """Binder and chooser of a source. The costs of a link change as it is measured."""

    def __init__(
        self,
        pools: PoolMap,
        rooms: RoomTable[Outgoing],
        links: TargetLinkTable,
        costs: LinkCostTable,
        override: TransferMode | None = None,
    ) -> None:
        self._pools = pools
        self._rooms = rooms
        self._links = links
        self._costs = costs
        self._override = override
        # Whole chunks are kept in it while something of them is not yet written.
        self._cache = BindingCache()

    def choose(self, transfer: TransferRequest, blocks: Sequence[Block]) -> tuple[bool, ...]:
        """Whether each block goes through staging. Binds them, so that a write finds them bound."""
        return tuple(self._stages(transfer, block) for block in blocks)

    def _stages(self, transfer: TransferRequest, block: Block) -> bool:
        link_cost = self._costs.of(transfer.session)
        if self._override is not None and not link_cost.maps_peer:
            return self._override is TransferMode.STAGED
        try:
            ((part, whole),) = _within(transfer, block)
            binding = self._part(transfer, part, whole)
        except InputError:
            # Its pages are not all known yet, or wrong; writing it will tell.
            return False
        if part == whole:
            self._links[transfer.session].prebind(binding)
        if link_cost.maps_peer:
            return False
        return choose(shape_of(binding), link_cost).mode is TransferMode.STAGED

    def binding(self, action: Write) -> Binding:
        """Return the binding of a direct write. Raises ``InputError`` where the pages are wrong."""
        transfer = action.transfer
        found: list[Binding] = []
        for block in action.blocks:
            for part, whole in _within(transfer, block):
                found.append(self._part(transfer, part, whole))
                if part == whole:
                    self._cache.drop(transfer.room, _key(transfer, whole))
        # The very one that was prebound, if there is one.
        return found[0] if len(found) == 1 else Binding(tuple(p for b in found for p in b.parts))

    def gathering(
        self, transfer: TransferRequest, blocks: Sequence[Block]
    ) -> Callable[[], Binding]:
        """Return a function that binds blocks to a slot, on any thread."""
        made = self._template(transfer, None, blocks)
        return partial(made.bind, self._tables(transfer.room), None)

    def forget(self, room: Room) -> None:
        """A room is over."""
        self._cache.forget(room)

    def _part(self, transfer: TransferRequest, block: Block, whole: Block) -> Binding:
        """Return the binding of a block, cut out of its chunk."""
        room, key = transfer.room, _key(transfer, whole)
        binding = self._cache.get(room, key)
        if binding is None:
            made = self._template(transfer, self._links[transfer.session].hello.pools, (whole,))
            binding = made.bind(self._tables(room), transfer.page_tables)
            self._cache.keep(room, key, binding)
        return binding if block == whole else binding.of_layers(block.layers)

    def _template(
        self, transfer: TransferRequest, target: PoolMap | None, blocks: Sequence[Block]
    ) -> BindingTemplate:
        pair = RankPair(transfer.source, transfer.peer.rank)
        pools = PairPools(transfer.plan, pair, self._pools, target)
        return self._cache.template(pools, transfer.request, blocks)

    def _tables(self, room: Room) -> Tables:
        handle = self._rooms.get(room)
        return handle.tables.tables() if handle else {}


def _within(transfer: TransferRequest, block: Block) -> list[tuple[Block, Block]]:
    """The chunks that a block has a part of, each as all layers that are owed alike."""
    owed = transfer.plan.blocks(transfer.source, transfer.peer.rank, transfer.request)
    if block in owed:
        return [(block, block)]
    mine = [replace(b, tokens=block.tokens) for b in owed if b.group == block.group]
    parts = [(replace(b, layers=b.layers.intersect(block.layers)), b) for b in mine]
    return [(part, whole) for part, whole in parts if len(part.layers)]


def _key(transfer: TransferRequest, whole: Block) -> object:
    return transfer.session, transfer.generation, whole
