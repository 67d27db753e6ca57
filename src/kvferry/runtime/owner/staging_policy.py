"""Which blocks go through staging: the chooser, asked with a room's own pages.

A chunk is bound once: what was bound to choose its path is written with the same binding, and
what of it comes layer by layer is cut out of it. A block of a few layers is looked at as what
it is: it may go another way than the whole chunk would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.ids import Room, Session
from kvferry.plan.bind import Binding, Outline, Pair, Side, outline
from kvferry.plan.choose import Path, choose, shape_of
from kvferry.plan.cost import Constants
from kvferry.plan.plan import Block, Request
from kvferry.protocol.events import TransferRequest, Write

# Chunks whose binding is kept while parts of it are still to come; others are bound again.
MAX_BOUND = 512
# Short requests of one size recur, and all but their pages is the same in each.
MAX_OUTLINES = 128


class Sides(NamedTuple):
    """Where a write reads and where it writes: pools and pages of both."""

    ours: Side
    theirs: Side


class StagingPolicy:
    """A staging policy. What a session's link costs may change as it is measured."""

    def __init__(
        self,
        rank: int,
        sides_of: Callable[[TransferRequest], Sides],
        constants_of: Callable[[Session], Constants],
        override: Path | None = None,
        foresee: Callable[[Session, Binding], None] = lambda _, __: None,
    ) -> None:
        self._rank = rank
        self._sides_of = sides_of
        self._constants_of = constants_of
        self._override = override
        self._foresee = foresee
        # Whole chunks that were bound, and of which something is not yet written.
        self._bound: OrderedDict[tuple[Room, Session, int, Block], Binding] = OrderedDict()
        self._outlines: dict[tuple[Session, Request, Block], Outline] = {}

    def stages(self, transfer: TransferRequest, block: Block) -> bool:
        """Whether a block goes through staging. Binds it, so that its write finds it bound."""
        constants = self._constants_of(transfer.session)
        if self._override is not None and not constants.maps_peer:
            return self._override is Path.STAGED
        try:
            binding = self._bound_early(transfer, block)
        except InputError:
            # Its pages are not all known yet, or wrong; writing it will tell.
            return False
        if constants.maps_peer:
            return False
        return choose(shape_of(binding), constants).path is Path.STAGED

    def _bound_early(self, transfer: TransferRequest, block: Block) -> Binding:
        ((part, whole),) = self._within(transfer, block)
        binding = self._part(transfer, part, whole)
        if part == whole:
            self._foresee(transfer.session, binding)
        return binding

    def binding(self, action: Write) -> Binding:
        """What a direct write copies. Raises ``InputError`` where the pages are wrong."""
        transfer = action.transfer
        found: list[Binding] = []
        for block in action.blocks:
            for part, whole in self._within(transfer, block):
                found.append(self._part(transfer, part, whole))
                if part == whole:
                    self._bound.pop(_key(transfer, whole), None)
        # The very one that was foreseen, if there is one.
        return found[0] if len(found) == 1 else Binding(tuple(p for b in found for p in b.parts))

    def forget(self, room: Room) -> None:
        """A room is over."""
        for key in [key for key in self._bound if key[0] == room]:
            del self._bound[key]

    def _within(self, transfer: TransferRequest, block: Block) -> list[tuple[Block, Block]]:
        """The chunks that a block has a part of, each as all layers that are owed alike."""
        owed = transfer.plan.blocks(self._rank, transfer.peer.rank, transfer.request)
        if block in owed:
            return [(block, block)]
        mine = [replace(b, tokens=block.tokens) for b in owed if b.group == block.group]
        parts = [(replace(b, layers=b.layers.intersect(block.layers)), b) for b in mine]
        return [(part, whole) for part, whole in parts if len(part.layers)]

    def _part(self, transfer: TransferRequest, block: Block, whole: Block) -> Binding:
        """What a block copies, cut out of its chunk."""
        key = _key(transfer, whole)
        binding = self._bound.get(key)
        if binding is None:
            binding = self._bound[key] = self._bind(transfer, whole)
            if len(self._bound) > MAX_BOUND:
                self._bound.popitem(last=False)
        return binding if block == whole else binding.of_layers(block.layers)

    def _bind(self, transfer: TransferRequest, whole: Block) -> Binding:
        ours, theirs = self._sides_of(transfer)
        key = transfer.session, transfer.request, whole
        known = self._outlines.get(key)
        if known is None:
            if len(self._outlines) >= MAX_OUTLINES:
                self._outlines.clear()
            pair = Pair(self._rank, transfer.peer.rank)
            pools = ours.pools, theirs.pools
            known = outline(transfer.plan, pair, transfer.request, *pools, (whole,))
            self._outlines[key] = known
        return known.on(ours.tables, theirs.tables)


def _key(transfer: TransferRequest, whole: Block) -> tuple[Room, Session, int, Block]:
    return transfer.room, transfer.session, transfer.generation, whole
