"""The chooser of a source: binds blocks to pages, and decides which go through staging.

A chunk is bound once, and stays in the cache until all of it is written. The binding that chose
its mode also writes it, and pushes of a few layers are cut out of it. The mode of such a push is
chosen for the cut alone, so it may differ from the mode of the whole chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvferry.endpoint.loop.links import TargetLinkTable
from kvferry.endpoint.loop.rooms import RoomTable
from kvferry.endpoint.outgoing import Outgoing
from kvferry.errors import InputError
from kvferry.ids import Room
from kvferry.plan.bind import Binding, BindingTemplate, RankPair, Tables
from kvferry.plan.binding_cache import PairPools
from kvferry.plan.choose import TransferMode, choose, shape_of
from kvferry.plan.cost import LinkCostTable
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Block
from kvferry.protocol.events import TransferRequest, Write


@dataclass(slots=True, eq=False)
class Chooser:
    """Binds and chooses for one source. ``override`` is the configured mode, if any."""

    pools: PoolMap
    rooms: RoomTable[Outgoing]
    links: TargetLinkTable
    costs: LinkCostTable
    override: TransferMode | None = None

    def choose(self, transfer: TransferRequest, blocks: Sequence[Block]) -> tuple[bool, ...]:
        """Return for each block whether it goes through staging. Binds blocks on the way."""
        return tuple(self._is_staged(transfer, block) for block in blocks)

    def _is_staged(self, transfer: TransferRequest, block: Block) -> bool:
        link_cost = self.costs.of(transfer.session)
        # A translated transfer can't be direct, whatever was configured.
        if self.override and not link_cost.maps_peer and not transfer.plan.forms.translated:
            return self.override is TransferMode.STAGED
        try:
            ((part, whole),) = _chunks_of(transfer, block)
            binding = self._bind(transfer, part, whole)
        except InputError:
            # Some pages are unknown or wrong. If they still are when it is written, that fails.
            return False
        if part == whole:
            self.links[transfer.session].prebind(binding)
        if link_cost.maps_peer:
            return False
        return choose(shape_of(binding), link_cost).mode is TransferMode.STAGED

    def binding(self, action: Write) -> Binding:
        """Return the binding of a direct write. Raises ``InputError`` if the pages are wrong."""
        transfer = action.transfer
        found: list[Binding] = []
        for block in action.blocks:
            for part, whole in _chunks_of(transfer, block):
                found.append(self._bind(transfer, part, whole))
                if part == whole:
                    self.rooms.bindings.drop(transfer.room, _key(transfer, whole))
        # A single binding must be the object that was prebound: the transport recognizes it.
        return found[0] if len(found) == 1 else Binding(tuple(p for b in found for p in b.parts))

    def gather_binder(
        self, transfer: TransferRequest, blocks: Sequence[Block]
    ) -> Callable[[], Binding]:
        """Return a function that binds blocks to a slot. Any thread may call it."""
        template = self._template(transfer, None, blocks)
        return partial(template.bind, self._tables(transfer.room), None)

    def _bind(self, transfer: TransferRequest, block: Block, whole: Block) -> Binding:
        """Return the binding of a block, cut out of that of its whole chunk."""
        room, key = transfer.room, _key(transfer, whole)
        binding = self.rooms.bindings.get(room, key)
        if binding is None:
            template = self._template(transfer, self.links[transfer.session].hello.pools, (whole,))
            binding = template.bind(self._tables(room), transfer.page_tables)
            self.rooms.bindings.keep(room, key, binding)
        return binding if block == whole else binding.of_layers(block.layers)

    def _template(
        self, transfer: TransferRequest, target: PoolMap | None, blocks: Sequence[Block]
    ) -> BindingTemplate:
        pair = RankPair(transfer.source, transfer.peer.rank)
        pools = PairPools(transfer.plan, pair, self.pools, target)
        return self.rooms.bindings.template(pools, transfer.request, blocks)

    def _tables(self, room: Room) -> Tables:
        handle = self.rooms.get(room)
        return handle.tables.tables() if handle else {}


def _chunks_of(transfer: TransferRequest, block: Block) -> list[tuple[Block, Block]]:
    """Return the parts of a block, each with its chunk: the same tokens of all owed layers."""
    owed = transfer.plan.blocks(transfer.source, transfer.peer.rank, transfer.request)
    if block in owed:
        return [(block, block)]
    chunks = [replace(b, tokens=block.tokens) for b in owed if b.group == block.group]
    parts = [(replace(b, layers=b.layers.intersect(block.layers)), b) for b in chunks]
    return [(part, chunk) for part, chunk in parts if len(part.layers)]


def _key(transfer: TransferRequest, whole: Block) -> object:
    return transfer.session, transfer.generation, whole
