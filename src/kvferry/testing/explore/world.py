"""The world between the runners: frames, writes, scatters, memory and clocks.

``ModelWorld`` is an immutable state. ``Draft`` is a state that a step is changing; it performs the
runners' calls of ports, and checks each promise where it could be broken:

- a write lands only in pages that the target has not released, and only in a slot that is promised
  to it at that moment; nothing is written twice;
- two writes in flight never share a slot of a target or a local slot;
- a source releases pages only when none of its writes is in flight;
- a target is Done only when all its atoms are in its pages and were computed for its own request,
  and a source only when every target is;
- each endpoint reports a room once, and then releases it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from kvferry.protocol.events import Event, Scattered, WriteEnded, WriteFate
from kvferry.testing.explore.catalogue import (
    Atom,
    BrokenModel,
    Catalogue,
    Frame,
    ModelScatter,
    ModelWrite,
    RunnerState,
)
from kvferry.testing.explore.model import PEERS, SOURCE, TARGETS


class ModelPhase(IntEnum):
    """The phase of a write or early gather, as only the world knows it."""

    SUBMITTED = 0  # will land soon
    STALLED = 1  # will land, but time may pass first
    LANDED = 2  # is in the target's memory; the source does not know yet
    DOUBTED = 3  # the source was told UNKNOWN: may land until the connection is cut
    DOUBTED_LANDED = 4  # the same, landed
    ORPHAN = 5  # its source is dead: may land until the connection is cut
    DOOMED = 6  # its target is dead: fails or becomes doubtful, or never ends
    CUT = 7  # the connection was cut: never lands, and is about to fail
    GATHERING = 8  # an early gather that is neither posted nor discarded
    HELD = 9  # the same, ended: waits to be posted or discarded
    FILLING = 10  # an early gather that is posted, and submitted when it ends
    DROPPING = 11  # an early gather that is discarded
    DROPPED = 12  # the same, ended; the source does not know yet


# Early gathers, which do not depend on the peer.
LOCAL = frozenset(
    {
        ModelPhase.GATHERING,
        ModelPhase.HELD,
        ModelPhase.FILLING,
        ModelPhase.DROPPING,
        ModelPhase.DROPPED,
    }
)
_SETTLED = (ModelPhase.DOUBTED, ModelPhase.DOUBTED_LANDED, ModelPhase.ORPHAN, *LOCAL)


class Stage(IntEnum):
    """The stage of a room at one endpoint, as its engine knows it."""

    UNBEGUN = 0
    BEGUN = 1
    DONE = 2
    FAILED = 3


class ModelWorld(NamedTuple):
    """One state of everything. ``runners`` to ``released`` have an entry for each endpoint.

    ``frames`` and ``late`` are sorted multisets; frames in ``late`` arrive at any time or never.
    ``probes`` has pairs of an endpoint and the peer that it probes. ``cut`` has the targets without
    a connection. ``pages`` and ``slots`` are the targets' memory. ``excused`` means that not
    everybody needs to be Done, because of a fault.
    """

    runners: tuple[RunnerState | None, ...]  # None is dead
    clocks: tuple[float, ...]
    scripts: tuple[int, ...]
    stages: tuple[Stage, ...]
    released: tuple[bool, ...]
    frames: tuple[Frame, ...]
    late: tuple[Frame, ...]
    writes: tuple[tuple[ModelWrite, ModelPhase], ...]
    scatters: tuple[ModelScatter, ...]
    probes: tuple[tuple[int, int], ...]
    cut: tuple[int, ...]
    pages: tuple[tuple[Atom, ...], ...]
    slots: tuple[tuple[ModelWrite | None, ...], ...]
    excused: bool
    num_faults: int

    @staticmethod
    def first(catalogue: Catalogue) -> ModelWorld:
        """Return the state before anything has happened."""
        everyone, model = len(PEERS), catalogue.model
        return ModelWorld(
            runners=catalogue.first_states(),
            clocks=(0.0,) * everyone,
            scripts=(0,) * everyone,
            stages=(Stage.UNBEGUN,) * everyone,
            released=(False,) * everyone,
            frames=(),
            late=(),
            writes=(),
            scatters=(),
            probes=(),
            cut=(),
            pages=((),) * len(TARGETS),
            slots=((None,) * model.staging.num_slots,) * len(TARGETS),
            excused=model.is_mixed_up,
            num_faults=0,
        )

    def is_settled(self, target: int) -> bool:
        """Return whether every write to a target has ended, or its end is never reported."""
        return all(phase in _SETTLED for write, phase in self.writes if write.to == target)

    def is_probed(self, target: int) -> bool:
        """Return whether one end of the connection to a target probes the other."""
        return (SOURCE, target) in self.probes or (target, SOURCE) in self.probes

    def overtakes(self, frame: Frame) -> bool:
        """Return whether an earlier frame in the same direction is still on its way."""
        return any(frame.overtakes(other) for other in self.frames)

    def leftovers(self) -> str:
        """Return what keeps the world from having ended: open rooms and tables not empty."""
        return "; ".join(
            f"{PEERS[index]}: {what}"
            for index, state in enumerate(self.runners)
            if state is not None
            for what in (*self._unended(index), *state.leftovers())
        )

    def _unended(self, index: int) -> Iterator[str]:
        stage = self.stages[index]
        if stage is Stage.BEGUN or (stage > Stage.BEGUN and not self.released[index]):
            yield f"the room is {stage.name}, its pages are held"


def _sorted(things: Any) -> Any:
    """Sort; most are empty or have one entry, and this runs for every step."""
    return tuple(sorted(things)) if len(things) > 1 else tuple(things)


class Draft:
    """A state that a step is changing."""

    def __init__(self, catalogue: Catalogue, world: ModelWorld) -> None:
        self.catalogue = catalogue
        self.model = catalogue.model
        self.runners = list(world.runners)
        self.clocks = list(world.clocks)
        self.scripts = list(world.scripts)
        self.stages = list(world.stages)
        self.released = list(world.released)
        self.frames = list(world.frames)
        self.late = list(world.late)
        self.writes = dict(world.writes)
        self.scatters = list(world.scatters)
        self.probes = set(world.probes)
        self.cut = set(world.cut)
        self.pages = list(world.pages)
        self.slots = list(world.slots)
        self.excused = world.excused
        self.num_faults = world.num_faults

    def world(self) -> ModelWorld:
        """Return the state after the step."""
        return ModelWorld(
            tuple(self.runners),
            tuple(self.clocks),
            tuple(self.scripts),
            tuple(self.stages),
            tuple(self.released),
            self._relevant(self.frames),
            self._relevant(self.late),
            _sorted(self.writes.items()),
            _sorted(self.scatters),
            _sorted(self.probes),
            _sorted(self.cut),
            tuple(self.pages),
            tuple(self.slots),
            self.excused,
            self.num_faults,
        )

    def _relevant(self, frames: list[Frame]) -> tuple[Frame, ...]:
        if not frames:
            return ()
        runners = self.runners
        return _sorted([one for one in frames if not runners[one.to].ignores(one)])  # type: ignore[union-attr,no-any-return]

    # ------------------------------------------------------------ calls of ports

    def handle(self, index: int, cause: Event | Frame) -> None:
        """Let a runner handle an event or a frame, and perform its calls of ports."""
        state = self.runners[index]
        assert state is not None
        self.runners[index], effects = self.catalogue.step(state, cause, self.clocks[index])
        for verb, thing in effects:
            self._perform(index, verb, thing)

    def _perform(self, index: int, verb: str, thing: Any) -> None:
        match verb:
            case "send":
                if self.runners[thing.to] is not None:
                    self.frames.append(thing)
            case "write":
                self._check_slots_free(thing)
                self.submit(thing)
            case "gather":
                self._check_slots_free(thing)
                self.writes[thing] = ModelPhase.GATHERING
            case "post":
                self._post(*thing)
            case "discard":
                gather = self._gather_of(thing)
                held = self.writes[gather] is ModelPhase.HELD
                self.writes[gather] = ModelPhase.DROPPED if held else ModelPhase.DROPPING
            case "scatter":
                self._scatter(thing)
            case "start_probing":
                self.probes.add((index, thing))
            case "stop_probing":
                self.probes.discard((index, thing))
            case "report":
                self._report(index, Stage.DONE if thing else Stage.FAILED)
            case "release":
                self._release(index)

    def _report(self, index: int, stage: Stage) -> None:
        me = PEERS[index]
        if self.stages[index] is not Stage.BEGUN:
            raise BrokenModel(f"{me} reports a room that is {self.stages[index].name}")
        if stage is Stage.DONE:
            self._check_done(index)
        self.stages[index] = stage
        if not self.model.heedless:
            # An engine does nothing more once the end was reported to it.
            self.scripts[index] = len(self.catalogue.scripts[index])

    def _check_done(self, index: int) -> None:
        me = PEERS[index]
        if index in TARGETS:
            missing = self.catalogue.owed[index].difference(self.pages[index - 1])
            if missing:
                raise BrokenModel(f"{me} is Done, but {sorted(missing)} never came")
        if self.model.is_mixed_up:
            raise BrokenModel(f"{me} is Done with another request's cache")
        if index == SOURCE and any(self.stages[target] is not Stage.DONE for target in TARGETS):
            raise BrokenModel(f"{me} is Done, but a target is not")

    def _release(self, index: int) -> None:
        me = PEERS[index]
        if self.stages[index] < Stage.DONE:
            raise BrokenModel(f"{me} releases pages of a room that has not ended")
        if self.released[index]:
            raise BrokenModel(f"{me} releases the room's pages twice")
        if index == SOURCE and self.writes:
            raise BrokenModel(f"{me} releases pages while {min(self.writes)} is in flight")
        self.released[index] = True

    # ------------------------------------------------------------ writes

    def _check_slots_free(self, write: ModelWrite) -> None:
        for other in self.writes:
            if write.shares_slot(other):
                raise BrokenModel(f"{write} uses a slot of {other}, which is in flight")
        if self.released[SOURCE]:
            raise BrokenModel(f"{write} reads pages that were released")

    def _post(self, op: int, slot: int | None, serial: int | None) -> None:
        gather = self._gather_of(op)
        phase = self.writes.pop(gather)
        what = gather.op, gather.to, gather.atoms, slot, serial, gather.local_slot
        write = self.catalogue.item(ModelWrite, *what)
        self._check_slots_free(write)
        if phase is ModelPhase.HELD:
            self.submit(write)
        else:
            self.writes[write] = ModelPhase.FILLING

    def _gather_of(self, op: int) -> ModelWrite:
        """Return the gather that is neither posted nor discarded; without one a promise breaks."""
        for write, phase in self.writes.items():
            if write.op == op and phase in (ModelPhase.GATHERING, ModelPhase.HELD):
                return write
        raise BrokenModel(f"write {op} is posted or discarded, and nothing was gathered for it")

    def submit(self, write: ModelWrite) -> None:
        """Hand a write to the transport."""
        phase = ModelPhase.CUT if write.to in self.cut else ModelPhase.SUBMITTED
        if phase is ModelPhase.SUBMITTED and self.runners[write.to] is None:
            phase = ModelPhase.DOOMED
        self.writes[write] = phase

    def store(self, write: ModelWrite) -> None:
        """Put the bytes of a write into its target's memory."""
        state = self.runners[write.to]
        if state is None:
            return
        if write.slot is None:
            self._fill_pages(write.to, write.atoms, str(write))
        elif not state.has_promised(write):
            raise BrokenModel(f"{write} landed in a slot that is not promised to it")
        else:
            self._set_slot(write.to, write.slot, write)

    def _fill_pages(self, target: int, atoms: tuple[Atom, ...], what: str) -> None:
        if self.stages[target] is Stage.UNBEGUN or self.released[target]:
            raise BrokenModel(f"{what} landed in pages that were released")
        twice = set(atoms).intersection(self.pages[target - 1])
        if twice:
            raise BrokenModel(f"{what} wrote {sorted(twice)} a second time")
        self.pages[target - 1] = tuple(sorted((*self.pages[target - 1], *atoms)))

    def _set_slot(self, target: int, slot: int, content: ModelWrite | None) -> None:
        slots = list(self.slots[target - 1])
        slots[slot] = content
        self.slots[target - 1] = tuple(slots)

    def sent(self, write: ModelWrite) -> None:
        """Tell the source that a write has landed."""
        del self.writes[write]
        self.handle(SOURCE, WriteEnded(write.op))

    def send_failed(self, write: ModelWrite, fate: WriteFate) -> None:
        """Tell the source that a write did not succeed."""
        if fate is WriteFate.UNKNOWN:
            landed = self.writes[write] is ModelPhase.LANDED
            self.writes[write] = ModelPhase.DOUBTED_LANDED if landed else ModelPhase.DOUBTED
        else:
            del self.writes[write]
        self.handle(SOURCE, WriteEnded(write.op, fate))

    # ------------------------------------------------------------ scatters

    def _scatter(self, scatter: ModelScatter) -> None:
        self._check_content(scatter)
        if any((one.at, one.slot) == (scatter.at, scatter.slot) for one in self.scatters):
            where = f"slot {scatter.slot} of {PEERS[scatter.at]}"
            raise BrokenModel(f"{where} is scattered twice at once")
        self.scatters.append(scatter)

    def _check_content(self, scatter: ModelScatter) -> None:
        write = self.slots[scatter.at - 1][scatter.slot]
        named = (scatter.serial, scatter.atoms)
        if write is None or (write.serial, write.atoms) != named:
            raise BrokenModel(f"{PEERS[scatter.at]} scatters {named}, but its slot holds {write}")

    def end_scatter(self, scatter: ModelScatter) -> None:
        """Copy a slot into pages, and tell the target."""
        self._check_content(scatter)
        self.scatters.remove(scatter)
        self._fill_pages(scatter.at, scatter.atoms, f"scatter {scatter.op}")
        self._set_slot(scatter.at, scatter.slot, None)
        self.handle(scatter.at, Scattered(scatter.op))
