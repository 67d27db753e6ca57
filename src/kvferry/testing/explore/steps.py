"""The steps that a world allows, and what each of them does.

Steps are of three kinds. *Due* steps happen before time passes: a frame is
delivered, an engine acts, a write lands. *Possible* steps may happen at any
time or never: a delayed frame, a write whose fate is unknown. *Faults* are
spent. When nothing is due and the room has not ended everywhere, time runs to
the earliest timer and every machine is ticked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvferry.protocol.events import Cancel, WriteFate
from kvferry.testing.explore.catalogue import BrokenModel, Catalogue
from kvferry.testing.explore.model import PEERS, REPAIRED, ROOM, SOURCE, TARGETS, ModelFault
from kvferry.testing.explore.world import DEAD, EMPTY, TICK, Draft, ModelPhase, ModelWorld, Stage

# What happens, to which thing (a number of the catalogue, an endpoint), as which fault.
Step = tuple[str, int, ModelFault | None]

_MAY_LAND = (ModelPhase.DOUBTED, ModelPhase.ORPHAN)
_WRITE_STEPS = {
    ModelPhase.SUBMITTED: "land",
    ModelPhase.LANDED: "sent",
    ModelPhase.CUT: "fail",
    ModelPhase.GATHERING: "filled",
    ModelPhase.FILLING: "filled",
    ModelPhase.DROPPING: "filled",
    ModelPhase.DROPPED: "dropped",
}
_FATES = {
    ModelFault.BUSY: WriteFate.BUSY,
    ModelFault.FAILED: WriteFate.FAILED,
    ModelFault.UNKNOWN: WriteFate.UNKNOWN,
}


def first_world(catalogue: Catalogue) -> ModelWorld:
    """Before anything has happened."""
    num_slots = catalogue.model.staging.num_slots
    return ModelWorld(
        machines=catalogue.first(),
        clocks=(0.0,) * len(PEERS),
        scripts=(0,) * len(PEERS),
        stages=(Stage.UNBEGUN,) * len(PEERS),
        released=(False,) * len(PEERS),
        frames=(),
        late=(),
        writes=(),
        scatters=(),
        told=(),
        cut=(),
        pages=((),) * len(TARGETS),
        slots=((EMPTY,) * num_slots,) * len(TARGETS),
        excused=catalogue.model.is_mixed_up,
        num_faults=0,
    )


def due(catalogue: Catalogue, world: ModelWorld) -> Iterator[Step]:
    """What happens before time passes."""
    for index, position in enumerate(world.scripts):
        if position < len(catalogue.scripts[index]):
            yield "engine", index, None
    for number in dict.fromkeys(world.frames):
        if not (catalogue.model.in_order and _overtakes(catalogue, world, number)):
            yield "deliver", number, None
    for number, phase in world.writes:
        verb = _WRITE_STEPS.get(phase)
        if verb or (phase is ModelPhase.STALLED and _overdue(catalogue, world)):
            yield verb or "land", number, None
    for number in world.scatters:
        yield "scatter", number, None
    for target in TARGETS:
        if world.is_asked(target) and target not in world.cut:
            yield "cut", target, None
    for index, peer in world.told:
        target = peer if index == SOURCE else index
        if target in world.cut and (index != SOURCE or world.is_settled(catalogue, target)):
            yield "disconnected", index * len(PEERS) + peer, None


def possible(catalogue: Catalogue, world: ModelWorld) -> Iterator[Step]:
    """What may happen at any time or never."""
    for number in dict.fromkeys(world.late):
        yield "deliver late", number, None
    for number, phase in world.writes:
        if phase in _MAY_LAND or (phase is ModelPhase.STALLED and not _overdue(catalogue, world)):
            yield "land", number, None
        elif phase is ModelPhase.DOOMED:
            yield "fail", number, None
            yield "doubt", number, None
    for target in TARGETS:
        both = world.alive(SOURCE) and world.alive(target)
        if not both and target not in world.cut and not world.is_asked(target):
            yield "notice", target, None


def _overdue(catalogue: Catalogue, world: ModelWorld) -> bool:
    """Whether even what takes long has to end, so that the room can."""
    return max(world.clocks) > 2 * catalogue.model.deadline_s


def _overtakes(catalogue: Catalogue, world: ModelWorld, number: int) -> bool:
    frame = catalogue.frames.things[number]
    if not frame.envelope.seq:
        return False
    others = map(catalogue.frames.things.__getitem__, world.frames)
    return any(
        0 < other.envelope.seq < frame.envelope.seq and other.stream == frame.stream
        for other in others
    )


def faults(catalogue: Catalogue, world: ModelWorld, kinds: frozenset[ModelFault]) -> Iterator[Step]:
    """What may go wrong now."""
    if not kinds or world.num_faults >= catalogue.model.max_faults:
        return
    at = catalogue.model.faults_at
    for number in dict.fromkeys(world.frames):
        frame = catalogue.frames.things[number]
        if {frame.to, PEERS.index(frame.envelope.sender)} <= at:
            loss = ModelFault.DROP if frame.envelope.seq else ModelFault.DROP_NOTE
            yield from _those((loss, ModelFault.DUPLICATE, ModelFault.DELAY), kinds, number)
    for number, phase in world.writes:
        if catalogue.writes.things[number].to in at:
            yield from _those(_write_faults(phase), kinds, number)
    for index in at:
        if world.alive(index):
            yield from _those(_endpoint_faults(catalogue, world, index), kinds, index)
    for target in at.intersection(TARGETS):
        if target not in world.cut and _is_linked(world, target):
            yield from _those((ModelFault.CUT,), kinds, target)


def _those(
    found: Iterable[ModelFault], kinds: frozenset[ModelFault], number: int
) -> Iterator[Step]:
    return (("fault", number, fault) for fault in found if fault in kinds)


def _is_linked(world: ModelWorld, target: int) -> bool:
    begun = world.stages[target] is not Stage.UNBEGUN
    return begun and world.alive(SOURCE) and world.alive(target)


def _write_faults(phase: ModelPhase) -> tuple[ModelFault, ...]:
    if phase is ModelPhase.SUBMITTED:
        return (ModelFault.BUSY, ModelFault.FAILED, ModelFault.UNKNOWN, ModelFault.STALL)
    if phase in (ModelPhase.GATHERING, ModelPhase.FILLING, ModelPhase.DROPPING):
        return (ModelFault.FAILED,)
    return (ModelFault.FAILED, ModelFault.UNKNOWN) if phase is ModelPhase.LANDED else ()


def _endpoint_faults(catalogue: Catalogue, world: ModelWorld, index: int) -> Iterator[ModelFault]:
    source, stage = index == SOURCE, world.stages[index]
    yield ModelFault.KILL_SOURCE if source else ModelFault.KILL_TARGET
    if world.scripts[index] < len(catalogue.scripts[index]):
        yield ModelFault.ABSENT
    if stage is Stage.BEGUN:
        yield ModelFault.CANCEL_SOURCE if source else ModelFault.CANCEL_TARGET
        yield ModelFault.DEADLINE
    if catalogue.wakeup(world.machines[index]) is not None:
        yield ModelFault.TICK
        yield ModelFault.SILENCE


# ------------------------------------------------------------ taking a step


def take(catalogue: Catalogue, world: ModelWorld, step: Step) -> ModelWorld:
    """The world after a step. Raises ``BrokenModel``."""
    verb, number, fault = step
    draft = Draft(catalogue, world)
    if fault is not None:
        draft.num_faults += 1
        draft.excused |= fault not in REPAIRED
        _FAULTS[fault](draft, number, fault)
    else:
        if verb == "deliver" and not world.excused and max(world.clocks) > 0:
            # Overtaking is loss. Once is repaired; again and again, for ever, is not.
            draft.excused = _overtakes(catalogue, world, number)
        _VERBS[verb](draft, number)
    return draft.world()


def _deliver(draft: Draft, number: int) -> None:
    draft.frames.remove(number)
    draft.tell(draft.catalogue.frames.things[number].to, draft.catalogue.arrival(number))


def _deliver_late(draft: Draft, number: int) -> None:
    draft.late.remove(number)
    draft.tell(draft.catalogue.frames.things[number].to, draft.catalogue.arrival(number))


def _engine(draft: Draft, index: int) -> None:
    event = draft.catalogue.scripts[index][draft.scripts[index]]
    draft.scripts[index] += 1
    if draft.stages[index] is Stage.UNBEGUN:
        draft.stages[index] = Stage.BEGUN
    draft.tell(index, event)


def _land(draft: Draft, number: int) -> None:
    phase = draft.writes[number]
    if phase is ModelPhase.ORPHAN:
        del draft.writes[number]
    else:
        doubted = phase is ModelPhase.DOUBTED
        draft.writes[number] = ModelPhase.DOUBTED_LANDED if doubted else ModelPhase.LANDED
    draft.land(number)


def _notice(draft: Draft, target: int) -> None:
    """The transport sees by itself that one end is dead."""
    draft.sever(target)
    if draft.machines[SOURCE] != DEAD:
        draft.told.add((SOURCE, target))
    if draft.machines[target] != DEAD:
        draft.told.add((target, SOURCE))


def _time(draft: Draft, _: int) -> None:
    living = [index for index, state in enumerate(draft.machines) if state != DEAD]
    waits = [
        wakeup - draft.clocks[index]
        for index in living
        if (wakeup := draft.catalogue.wakeup(draft.machines[index])) is not None
    ]
    if not waits or max(draft.clocks) > draft.catalogue.model.horizon_s:
        raise BrokenModel(f"a room never ends: {leftovers(draft.catalogue, draft.world())}")
    if min(waits) < 0:
        raise BrokenModel("a timer lies in the past after its Tick")
    for index in living:
        draft.clocks[index] += min(waits)
    for index in living:
        draft.tell(index, draft.catalogue.events.of(TICK))
        overdue = draft.clocks[index] >= draft.catalogue.model.deadline_s
        if overdue and draft.stages[index] is Stage.BEGUN:
            raise BrokenModel(f"{PEERS[index]} has reported nothing by its deadline")


_VERBS: dict[str, Callable[[Draft, int], None]] = {
    "deliver": _deliver,
    "deliver late": _deliver_late,
    "engine": _engine,
    "land": _land,
    "sent": Draft.sent,
    "fail": lambda draft, number: draft.send_failed(number, WriteFate.FAILED),
    "filled": Draft.filled,
    "dropped": lambda draft, number: draft.send_failed(number, WriteFate.BUSY),
    "doubt": lambda draft, number: draft.send_failed(number, WriteFate.UNKNOWN),
    "scatter": Draft.end_scatter,
    "cut": Draft.sever,
    "disconnected": lambda draft, pair: draft.disconnected(*divmod(pair, len(PEERS))),
    "notice": _notice,
    "time": _time,
}


def _drop(draft: Draft, number: int, fault: ModelFault) -> None:
    draft.frames.remove(number)
    if fault is ModelFault.DELAY:
        draft.late.append(number)


def _cancel(draft: Draft, index: int, fault: ModelFault) -> None:
    draft.tell(index, draft.catalogue.events.of(Cancel(ROOM)))


def _absent(draft: Draft, index: int, fault: ModelFault) -> None:
    draft.scripts[index] = len(draft.catalogue.scripts[index])


def _run_ahead(draft: Draft, index: int, fault: ModelFault) -> None:
    model = draft.catalogue.model
    if fault is ModelFault.DEADLINE:
        draft.jump(index, model.deadline_s)
    elif fault is ModelFault.SILENCE:
        draft.jump(index, draft.clocks[index] + model.times.silence_s)
    else:
        draft.jump(index, draft.catalogue.wakeup(draft.machines[index]) or 0.0)
        draft.excused |= draft.clocks[index] >= model.deadline_s


_FAULTS: dict[ModelFault, Callable[[Draft, int, ModelFault], None]] = {
    ModelFault.DROP: _drop,
    ModelFault.DROP_NOTE: _drop,
    ModelFault.DELAY: _drop,
    ModelFault.DUPLICATE: lambda draft, number, fault: draft.frames.append(number),
    ModelFault.STALL: lambda draft, number, fault: draft.writes.update(
        {number: ModelPhase.STALLED}
    ),
    ModelFault.CUT: lambda draft, target, fault: _notice(draft, target),
    ModelFault.CANCEL_SOURCE: _cancel,
    ModelFault.CANCEL_TARGET: _cancel,
    ModelFault.KILL_SOURCE: lambda draft, index, fault: draft.kill(index),
    ModelFault.KILL_TARGET: lambda draft, index, fault: draft.kill(index),
    ModelFault.ABSENT: _absent,
    ModelFault.TICK: _run_ahead,
    ModelFault.DEADLINE: _run_ahead,
    ModelFault.SILENCE: _run_ahead,
    **dict.fromkeys(_FATES, lambda draft, number, fault: draft.send_failed(number, _FATES[fault])),
}


# ------------------------------------------------------------ ends


def leftovers(catalogue: Catalogue, world: ModelWorld) -> str:
    """What keeps a world from having ended: rooms of living endpoints and full tables."""
    found = [
        f"{PEERS[index]}: {what}"
        for index, state in enumerate(world.machines)
        if state != DEAD
        for what in (*_unended(world, index), *catalogue.leftovers(state))
    ]
    return "; ".join(found)


def _unended(world: ModelWorld, index: int) -> list[str]:
    stage = world.stages[index]
    if stage is Stage.UNBEGUN or (stage > Stage.BEGUN and world.released[index]):
        return []
    return [f"the room is {stage.name}, its pages are held"]


def demand_done(world: ModelWorld) -> None:
    """Where nothing happened that excuses it, everybody must be Done at the end."""
    if not world.excused and any(stage is not Stage.DONE for stage in world.stages):
        stages = ", ".join(f"{PEERS[i]} {stage.name}" for i, stage in enumerate(world.stages))
        raise BrokenModel(f"not everybody is Done at the end: {stages}")


def describe(catalogue: Catalogue, step: Step) -> str:
    """A step in words."""
    verb, number, fault = step
    if fault is not None:
        return f"FAULT {fault.name} ({fault.value}): {_thing(catalogue, fault, number)}"
    match verb:
        case "deliver" | "deliver late":
            thing = str(catalogue.frames.things[number])
        case "land" | "sent" | "fail" | "doubt" | "filled" | "dropped":
            return f"{catalogue.writes.things[number]}: {verb}"
        case "scatter":
            scatter = catalogue.scatters.things[number]
            thing = f"{scatter.op} of slot {scatter.slot} ends at {PEERS[scatter.at]}"
        case "disconnected":
            index, peer = divmod(number, len(PEERS))
            thing = f"{PEERS[peer]}, {PEERS[index]} is told"
        case "time":
            thing = "passes to the earliest timer"
        case _:
            thing = str(PEERS[number])
    return f"{verb} {thing}"


def _thing(catalogue: Catalogue, fault: ModelFault, number: int) -> str:
    if fault in (ModelFault.DROP, ModelFault.DROP_NOTE, ModelFault.DUPLICATE, ModelFault.DELAY):
        return str(catalogue.frames.things[number])
    if fault in _FATES or fault is ModelFault.STALL:
        return str(catalogue.writes.things[number])
    return str(PEERS[number])
