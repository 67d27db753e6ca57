"""The world between the machines: frames, writes, scatters, memory, clocks.

A ``ModelWorld`` is a value made of numbers from the catalogue. A ``Draft`` is one
that is being changed by a step; it carries out actions, and checks each promise
where it could be broken:

- a write lands only in pages that the target has not released, and only in a
  slot that is promised to it at that moment; nothing is written twice;
- two writes in flight never share a slot of a target or a local slot;
- a source releases pages only when none of its writes is in flight;
- a target is Done only when everything owed is in its pages and was computed for
  its own request, and a source only when every target is;
- Report and Release are said once each, in that order.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple, TypeVar

from kvferry.endpoint.runner.runner import PeerGone
from kvferry.protocol.events import Scattered, SendFailed, Sent, Tick, WriteFate
from kvferry.testing.explore.catalogue import Atom, BrokenModel, Catalogue, Effect, EffectKind
from kvferry.testing.explore.model import INCARNATIONS, PEERS, SOURCE, TARGETS

# Numbers, or pairs of them.
T = TypeVar("T", int, tuple[int, int], tuple[int, "ModelPhase"])

DEAD = -1
EMPTY = -1
TICK = Tick()


class ModelPhase(IntEnum):
    """Where a write stands, as only the world knows it."""

    SUBMITTED = 0  # will land, and soon
    STALLED = 1  # will land, but time may pass first
    LANDED = 2  # is in the target's memory; the source has not heard so
    DOUBTED = 3  # the source was told UNKNOWN: may land until the connection is cut
    DOUBTED_LANDED = 4  # the same, landed
    ORPHAN = 5  # its source is dead: may land until the connection is cut
    DOOMED = 6  # its target is dead: ends in failure or doubt, or not at all
    CUT = 7  # the connection was cut: it never lands, and is about to fail
    GATHERING = 8  # its local slot is being filled, and what becomes of that is not said
    HELD = 9  # the slot is filled, and nothing happens before it is posted or discarded
    FILLING = 10  # the slot is being filled, and will then be submitted
    DROPPING = 11  # the slot is being filled, and will then be let go of
    DROPPED = 12  # was let go of; the source has not heard so


# Nothing of these concerns a peer: they are told of, whatever becomes of it.
LOCAL = frozenset(
    {
        ModelPhase.GATHERING,
        ModelPhase.HELD,
        ModelPhase.FILLING,
        ModelPhase.DROPPING,
        ModelPhase.DROPPED,
    }
)


class Stage(IntEnum):
    """How far an endpoint's caller has got with the room."""

    UNBEGUN = 0
    BEGUN = 1
    DONE = 2
    FAILED = 3


class ModelWorld(NamedTuple):
    """One state of everything. ``machines`` to ``released`` have an entry for each endpoint.

    ``frames`` and ``late`` are multisets, sorted; frames in ``late`` may come at
    any time or never. ``told`` holds who will be told of which peer's end.
    ``pages`` and ``slots`` are the targets' memory. ``excused``: something has
    happened after which not everybody needs to be Done.
    """

    machines: tuple[int, ...]
    clocks: tuple[float, ...]
    scripts: tuple[int, ...]
    stages: tuple[Stage, ...]
    released: tuple[bool, ...]
    frames: tuple[int, ...]
    late: tuple[int, ...]
    writes: tuple[tuple[int, ModelPhase], ...]
    scatters: tuple[int, ...]
    told: tuple[tuple[int, int], ...]
    cut: tuple[int, ...]
    pages: tuple[tuple[Atom, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    excused: bool
    num_faults: int

    def alive(self, index: int) -> bool:
        """Whether that endpoint lives."""
        return self.machines[index] != DEAD

    def is_settled(self, catalogue: Catalogue, target: int) -> bool:
        """Whether every write to that target has ended, or will never be told of again."""
        return all(
            phase in (ModelPhase.DOUBTED, ModelPhase.DOUBTED_LANDED, ModelPhase.ORPHAN, *LOCAL)
            for number, phase in self.writes
            if catalogue.writes.things[number].to == target
        )

    def is_asked(self, target: int) -> bool:
        """Whether somebody has asked for the connection to that target to be torn down."""
        return (SOURCE, target) in self.told or (target, SOURCE) in self.told


def _ordered(things: Collection[T]) -> tuple[T, ...]:
    """Most are empty or have one entry, and this is done for every step."""
    return tuple(sorted(things)) if len(things) > 1 else tuple(things)


class Draft:
    """A world that is being changed."""

    def __init__(self, catalogue: Catalogue, world: ModelWorld) -> None:
        self.catalogue = catalogue
        self.machines = list(world.machines)
        self.clocks = list(world.clocks)
        self.scripts = list(world.scripts)
        self.stages = list(world.stages)
        self.released = list(world.released)
        self.frames = list(world.frames)
        self.late = list(world.late)
        self.writes = dict(world.writes)
        self.scatters = list(world.scatters)
        self.told = set(world.told)
        self.cut = set(world.cut)
        self.pages = list(world.pages)
        self.slots = list(world.slots)
        self.excused = world.excused
        self.num_faults = world.num_faults

    def world(self) -> ModelWorld:
        """The finished world."""
        return ModelWorld(
            tuple(self.machines),
            tuple(self.clocks),
            tuple(self.scripts),
            tuple(self.stages),
            tuple(self.released),
            self._worth_keeping(self.frames),
            self._worth_keeping(self.late),
            _ordered(self.writes.items()),
            _ordered(self.scatters),
            _ordered(self.told),
            _ordered(self.cut),
            tuple(self.pages),
            tuple(self.slots),
            self.excused,
            self.num_faults,
        )

    def _worth_keeping(self, frames: list[int]) -> tuple[int, ...]:
        if not frames:
            return ()
        is_moot, machines = self.catalogue.is_moot, self.machines
        return tuple(sorted([number for number in frames if not is_moot(machines, number)]))

    # ------------------------------------------------------------ machines

    def tell(self, index: int, event: int) -> None:
        """Let a machine take a step and carry out what it asks for."""
        answer = self.catalogue.step(self.machines[index], event, self.clocks[index])
        self.machines[index], effects = answer
        for effect in effects:
            self._carry_out(index, effect)

    def _carry_out(self, index: int, effect: Effect) -> None:
        kind, number = effect
        match kind:
            case EffectKind.FRAME:
                if self.machines[self.catalogue.frames.things[number].to] != DEAD:
                    self.frames.append(number)
            case EffectKind.WRITE:
                self._demand_free(number)
                self._submit(number)
            case EffectKind.GATHER:
                self._demand_free(number)
                self.writes[number] = ModelPhase.GATHERING
            case EffectKind.POST:
                self._post(number)
            case EffectKind.DISCARD:
                self._discard(number)
            case EffectKind.SCATTER:
                self._start_scatter(number)
            case EffectKind.START_PROBING:
                self.told.add((index, number))
            case EffectKind.STOP_PROBING:
                self.told.discard((index, number))
            case EffectKind.DONE:
                self._report(index, Stage.DONE)
            case EffectKind.FAILED:
                self._report(index, Stage.FAILED)
            case EffectKind.RELEASE:
                self._release(index)

    def _report(self, index: int, stage: Stage) -> None:
        me = PEERS[index]
        if self.stages[index] is not Stage.BEGUN:
            raise BrokenModel(f"{me} reports a room that is {self.stages[index].name}")
        if stage is Stage.DONE and index in TARGETS:
            missing = self.catalogue.owed(index).difference(self.pages[index - 1])
            if missing:
                raise BrokenModel(f"{me} is Done, but {sorted(missing)} never came")
        if stage is Stage.DONE and self.catalogue.model.is_mixed_up:
            raise BrokenModel(f"{me} is Done with another request's cache")
        all_done = all(self.stages[target] is Stage.DONE for target in TARGETS)
        if stage is Stage.DONE and index == SOURCE and not all_done:
            raise BrokenModel(f"{me} is Done, but a target is not")
        self.stages[index] = stage
        if not self.catalogue.model.heedless:
            # An engine that has been told of the end does nothing more.
            self.scripts[index] = len(self.catalogue.scripts[index])

    def _release(self, index: int) -> None:
        me = PEERS[index]
        if self.stages[index] < Stage.DONE:
            raise BrokenModel(f"{me} releases pages of a room that has not ended")
        if self.released[index]:
            raise BrokenModel(f"{me} releases the room's pages twice")
        if index == SOURCE and self.writes:
            one = self.catalogue.writes.things[min(self.writes)]
            raise BrokenModel(f"{me} releases pages while {one} is in flight")
        self.released[index] = True

    # ------------------------------------------------------------ writes

    def _demand_free(self, number: int) -> None:
        writing = self.catalogue.writes.things[number]
        for other in map(self.catalogue.writes.things.__getitem__, self.writes):
            if writing.shares_a_slot_with(other):
                raise BrokenModel(f"{writing} uses a slot of {other}, which is in flight")
        if self.released[SOURCE]:
            raise BrokenModel(f"{writing} reads pages that were released")

    def _post(self, post: int) -> None:
        gather = self._gather_of(self.catalogue.posts.things[post][0])
        phase, number = self.writes.pop(gather), self.catalogue.posted(gather, post)
        self._demand_free(number)
        if phase is ModelPhase.HELD:
            self._submit(number)
        else:
            self.writes[number] = ModelPhase.FILLING

    def _discard(self, op: int) -> None:
        number = self._gather_of(op)
        held = self.writes[number] is ModelPhase.HELD
        self.writes[number] = ModelPhase.DROPPED if held else ModelPhase.DROPPING

    def _gather_of(self, op: int) -> int:
        """The gather of that write. Whoever posts or discards another breaks a promise."""
        for number, phase in self.writes.items():
            mine = self.catalogue.writes.things[number].op == op
            if mine and phase in (ModelPhase.GATHERING, ModelPhase.HELD):
                return number
        raise BrokenModel(f"write {op} is posted or discarded, and nothing was gathered for it")

    def filled(self, number: int) -> None:
        """The gather of a write has ended."""
        phase = self.writes.pop(number)
        if phase is ModelPhase.FILLING:
            self._submit(number)
        else:
            self.writes[number] = (
                ModelPhase.DROPPED if phase is ModelPhase.DROPPING else ModelPhase.HELD
            )

    def _submit(self, number: int) -> None:
        writing = self.catalogue.writes.things[number]
        phase = ModelPhase.CUT if writing.to in self.cut else ModelPhase.SUBMITTED
        if phase is ModelPhase.SUBMITTED and self.machines[writing.to] == DEAD:
            phase = ModelPhase.DOOMED
        self.writes[number] = phase

    def land(self, number: int) -> None:
        """The bytes of a write."""
        writing = self.catalogue.writes.things[number]
        target = writing.to
        if self.machines[target] == DEAD:
            return
        if writing.slot is None:
            self._fill_pages(target, writing.atoms, str(writing))
        else:
            promised = self.catalogue.promised(self.machines[target], writing.slot, writing.serial)
            if not promised:
                raise BrokenModel(f"{writing} landed in a slot that is not promised to it")
            self._set_slot(target, writing.slot, number)

    def _fill_pages(self, target: int, atoms: tuple[Atom, ...], what: str) -> None:
        if self.stages[target] is Stage.UNBEGUN or self.released[target]:
            raise BrokenModel(f"{what} landed in pages that were released")
        twice = set(atoms).intersection(self.pages[target - 1])
        if twice:
            raise BrokenModel(f"{what} wrote {sorted(twice)} a second time")
        self.pages[target - 1] = tuple(sorted((*self.pages[target - 1], *atoms)))

    def _set_slot(self, target: int, slot: int, content: int) -> None:
        slots = list(self.slots[target - 1])
        slots[slot] = content
        self.slots[target - 1] = tuple(slots)

    def sent(self, number: int) -> None:
        """The source hears that a write has landed."""
        del self.writes[number]
        op = self.catalogue.writes.things[number].op
        self.tell(SOURCE, self.catalogue.events.of(Sent(op)))

    def send_failed(self, number: int, fate: WriteFate) -> None:
        """The source hears that a write did not succeed."""
        if fate is WriteFate.UNKNOWN:
            landed = self.writes[number] is ModelPhase.LANDED
            self.writes[number] = ModelPhase.DOUBTED_LANDED if landed else ModelPhase.DOUBTED
        else:
            del self.writes[number]
        op = self.catalogue.writes.things[number].op
        self.tell(SOURCE, self.catalogue.events.of(SendFailed(op, fate)))

    # ------------------------------------------------------------ scatters

    def _start_scatter(self, number: int) -> None:
        scatter = self.catalogue.scatters.things[number]
        self._demand_content(number)
        under_way = map(self.catalogue.scatters.things.__getitem__, self.scatters)
        if any((other.at, other.slot) == (scatter.at, scatter.slot) for other in under_way):
            raise BrokenModel(
                f"slot {scatter.slot} of {PEERS[scatter.at]} is scattered twice at once"
            )
        self.scatters.append(number)

    def _demand_content(self, number: int) -> None:
        scatter = self.catalogue.scatters.things[number]
        content = self.slots[scatter.at - 1][scatter.slot]
        writing = self.catalogue.writes.things[content] if content != EMPTY else None
        named = (scatter.serial, scatter.atoms)
        if writing is None or (writing.serial, writing.atoms) != named:
            raise BrokenModel(f"{PEERS[scatter.at]} scatters {named}, but its slot holds {writing}")

    def end_scatter(self, number: int) -> None:
        """A slot's bytes are in the pages, and the target hears so."""
        scatter = self.catalogue.scatters.things[number]
        self._demand_content(number)
        self.scatters.remove(number)
        self._fill_pages(scatter.at, scatter.atoms, f"scatter {scatter.op}")
        self._set_slot(scatter.at, scatter.slot, EMPTY)
        self.tell(scatter.at, self.catalogue.events.of(Scattered(scatter.op)))

    # ------------------------------------------------------------ connections

    def sever(self, target: int) -> None:
        """From now on no write between the source and that target can land."""
        self.cut.add(target)
        source_lives = self.machines[SOURCE] != DEAD
        for number, phase in list(self.writes.items()):
            unmoved = phase is ModelPhase.LANDED or phase in LOCAL
            if self.catalogue.writes.things[number].to != target or unmoved:
                continue
            if source_lives and phase in (
                ModelPhase.SUBMITTED,
                ModelPhase.STALLED,
                ModelPhase.DOOMED,
            ):
                self.writes[number] = ModelPhase.CUT
            elif phase is not ModelPhase.CUT:
                del self.writes[number]

    def disconnected(self, index: int, peer: int) -> None:
        """An endpoint gets its proof that nothing is in flight to or from a peer."""
        self.told.discard((index, peer))
        if index == SOURCE:
            for number, phase in list(self.writes.items()):
                if self.catalogue.writes.things[number].to == peer and phase not in LOCAL:
                    del self.writes[number]
        event = PeerGone(PEERS[peer], INCARNATIONS[peer])
        self.tell(index, self.catalogue.events.of(event))

    def kill(self, index: int) -> None:
        """An endpoint dies. What it sent is still under way; what it asked for is not."""
        things = self.catalogue
        self.machines[index] = DEAD
        self.scripts[index] = len(things.scripts[index])
        self.frames = [n for n in self.frames if things.frames.things[n].to != index]
        self.late = [n for n in self.late if things.frames.things[n].to != index]
        self.scatters = [n for n in self.scatters if things.scatters.things[n].at != index]
        self.told = {pair for pair in self.told if pair[0] != index}
        for number, phase in list(self.writes.items()):
            under_way = phase in (ModelPhase.SUBMITTED, ModelPhase.STALLED)
            if index == SOURCE and (under_way or phase is ModelPhase.DOUBTED):
                self.writes[number] = ModelPhase.ORPHAN
            elif index == SOURCE:
                del self.writes[number]
            elif under_way and things.writes.things[number].to == index:
                self.writes[number] = ModelPhase.DOOMED

    def jump(self, index: int, to: float) -> None:
        """One endpoint's clock runs ahead."""
        self.clocks[index] = max(self.clocks[index], to)
        self.tell(index, self.catalogue.events.of(TICK))
