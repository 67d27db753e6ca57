"""The steps that a world allows, and what each of them does.

*Due* steps happen before time passes: a frame is delivered, an engine acts, a write lands.
*Possible* steps may happen at any time or never: a delayed frame, a write of unknown fate. *Faults*
are limited in number. When nothing is due and the room has not ended everywhere, time runs to the
earliest timer and every machine ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvferry.endpoint.runner.runner import PeerGone
from kvferry.protocol.events import Cancel, Tick, WriteFate
from kvferry.testing.explore.catalogue import BrokenModel, Catalogue, Frame, ModelWrite
from kvferry.testing.explore.model import (
    INCARNATIONS,
    PEERS,
    REPAIRED,
    ROOM,
    SOURCE,
    TARGETS,
    ExploredModel,
    ModelFault,
)
from kvferry.testing.explore.world import LOCAL, Draft, ModelPhase, ModelWorld, Stage

# A verb, the thing that it concerns (an item, an endpoint, a pair of them), and the fault if any.
Step = tuple[str, Any, ModelFault | None]

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


def due(catalogue: Catalogue, world: ModelWorld) -> Iterator[Step]:
    """Yield the steps that happen before time passes."""
    model = catalogue.model
    for index, position in enumerate(world.scripts):
        if position < len(catalogue.scripts[index]):
            yield "engine", index, None
    for frame in dict.fromkeys(world.frames):
        if not (model.in_order and world.overtakes(frame)):
            yield "deliver", frame, None
    for write, phase in world.writes:
        verb = _WRITE_STEPS.get(phase)
        if verb or (phase is ModelPhase.STALLED and _must_land(model, world)):
            yield verb or "land", write, None
    for scatter in world.scatters:
        yield "scatter", scatter, None
    for target in TARGETS:
        if world.is_probed(target) and target not in world.cut:
            yield "cut", target, None
    for index, peer in world.probes:
        target = peer if index == SOURCE else index
        if target in world.cut and (index != SOURCE or world.is_settled(target)):
            yield "disconnected", (index, peer), None


def possible(model: ExploredModel, world: ModelWorld) -> Iterator[Step]:
    """Yield the steps that may happen at any time or never."""
    for frame in dict.fromkeys(world.late):
        yield "deliver late", frame, None
    for write, phase in world.writes:
        if phase in _MAY_LAND or (phase is ModelPhase.STALLED and not _must_land(model, world)):
            yield "land", write, None
        elif phase is ModelPhase.DOOMED:
            yield "fail", write, None
            yield "doubt", write, None
    for target in TARGETS:
        both = world.runners[SOURCE] is not None and world.runners[target] is not None
        if not both and target not in world.cut and not world.is_probed(target):
            yield "notice", target, None


def _must_land(model: ExploredModel, world: ModelWorld) -> bool:
    """Return whether even a stalled write has to end now, so that the room can."""
    return max(world.clocks) > 2 * model.deadline_s


def faults(catalogue: Catalogue, world: ModelWorld, kinds: frozenset[ModelFault]) -> Iterator[Step]:
    """Yield the faults of these kinds that may happen now."""
    if kinds and world.num_faults < catalogue.model.max_faults:
        for thing, found in _faults_of(catalogue, world):
            yield from (("fault", thing, fault) for fault in found if fault in kinds)


def _faults_of(
    catalogue: Catalogue, world: ModelWorld
) -> Iterator[tuple[Any, Iterable[ModelFault]]]:
    at = catalogue.model.faults_at
    for frame in dict.fromkeys(world.frames):
        if {frame.to, PEERS.index(frame.envelope.sender)} <= at:
            loss = ModelFault.DROP if frame.envelope.seq else ModelFault.DROP_NOTE
            yield frame, (loss, ModelFault.DUPLICATE, ModelFault.DELAY)
    for write, phase in world.writes:
        if write.to in at:
            yield write, _write_faults(phase)
    for index in at:
        if world.runners[index] is not None:
            yield index, _endpoint_faults(world, index, len(catalogue.scripts[index]))
    for target in at.intersection(TARGETS):
        alive = world.runners[SOURCE] is not None and world.runners[target] is not None
        if alive and target not in world.cut and world.stages[target] is not Stage.UNBEGUN:
            yield target, (ModelFault.CUT,)


def _write_faults(phase: ModelPhase) -> tuple[ModelFault, ...]:
    if phase is ModelPhase.SUBMITTED:
        return (ModelFault.BUSY, ModelFault.FAILED, ModelFault.UNKNOWN, ModelFault.STALL)
    if phase in (ModelPhase.GATHERING, ModelPhase.FILLING, ModelPhase.DROPPING):
        return (ModelFault.FAILED,)
    return (ModelFault.FAILED, ModelFault.UNKNOWN) if phase is ModelPhase.LANDED else ()


def _endpoint_faults(world: ModelWorld, index: int, num_calls: int) -> Iterator[ModelFault]:
    source, stage, state = index == SOURCE, world.stages[index], world.runners[index]
    yield ModelFault.KILL_SOURCE if source else ModelFault.KILL_TARGET
    if world.scripts[index] < num_calls:
        yield ModelFault.ABSENT
    if stage is Stage.BEGUN:
        yield ModelFault.CANCEL_SOURCE if source else ModelFault.CANCEL_TARGET
        yield ModelFault.DEADLINE
    if state is not None and state.wakeup is not None:
        yield ModelFault.TICK
        yield ModelFault.SILENCE


# ------------------------------------------------------------ taking a step


def take(catalogue: Catalogue, world: ModelWorld, step: Step) -> ModelWorld:
    """Return the world after a step. Raises ``BrokenModel`` if that breaks a promise."""
    verb, thing, fault = step
    draft = Draft(catalogue, world)
    if fault is not None:
        draft.num_faults += 1
        draft.excused |= fault not in REPAIRED
        _FAULTS[fault](draft, thing, fault)
    else:
        if verb == "deliver" and not world.excused and max(world.clocks) > 0:
            # Overtaking is loss, which the protocol repairs once but not for ever.
            draft.excused = world.overtakes(thing)
        _VERBS[verb](draft, thing)
    return draft.world()


def _deliver(draft: Draft, frame: Frame) -> None:
    draft.frames.remove(frame)
    draft.handle(frame.to, frame)


def _deliver_late(draft: Draft, frame: Frame) -> None:
    draft.late.remove(frame)
    draft.handle(frame.to, frame)


def _call(draft: Draft, index: int) -> None:
    event = draft.catalogue.scripts[index][draft.scripts[index]]
    draft.scripts[index] += 1
    if draft.stages[index] is Stage.UNBEGUN:
        draft.stages[index] = Stage.BEGUN
    draft.handle(index, event)


def _land(draft: Draft, write: ModelWrite) -> None:
    phase = draft.writes[write]
    if phase is ModelPhase.ORPHAN:
        del draft.writes[write]
    else:
        doubted = phase is ModelPhase.DOUBTED
        draft.writes[write] = ModelPhase.DOUBTED_LANDED if doubted else ModelPhase.LANDED
    draft.store(write)


def _filled(draft: Draft, write: ModelWrite) -> None:
    """End an early gather."""
    phase = draft.writes.pop(write)
    if phase is ModelPhase.FILLING:
        draft.submit(write)
    else:
        dropping = phase is ModelPhase.DROPPING
        draft.writes[write] = ModelPhase.DROPPED if dropping else ModelPhase.HELD


def _cut(draft: Draft, target: int) -> None:
    """Let no further write between the source and a target land."""
    draft.cut.add(target)
    source_lives = draft.runners[SOURCE] is not None
    for write, phase in list(draft.writes.items()):
        if write.to != target or phase is ModelPhase.LANDED or phase in LOCAL:
            continue
        pending = phase in (ModelPhase.SUBMITTED, ModelPhase.STALLED, ModelPhase.DOOMED)
        if source_lives and pending:
            draft.writes[write] = ModelPhase.CUT
        elif phase is not ModelPhase.CUT:
            del draft.writes[write]


def _disconnected(draft: Draft, pair: tuple[int, int]) -> None:
    """Give an endpoint its proof that nothing is in flight to or from a peer."""
    index, peer = pair
    draft.probes.discard(pair)
    if index == SOURCE:
        for write, phase in list(draft.writes.items()):
            if write.to == peer and phase not in LOCAL:
                del draft.writes[write]
    draft.handle(index, PeerGone(PEERS[peer], INCARNATIONS[peer]))


def _notice(draft: Draft, target: int) -> None:
    """Cut a connection; both ends that live notice it."""
    _cut(draft, target)
    if draft.runners[SOURCE] is not None:
        draft.probes.add((SOURCE, target))
    if draft.runners[target] is not None:
        draft.probes.add((target, SOURCE))


def _pass_time(draft: Draft, _: int) -> None:
    living = {index: state for index, state in enumerate(draft.runners) if state is not None}
    waits = [
        state.wakeup - draft.clocks[index]
        for index, state in living.items()
        if state.wakeup is not None
    ]
    if not waits or max(draft.clocks) > draft.model.horizon_s:
        raise BrokenModel(f"a room never ends: {draft.world().leftovers()}")
    if min(waits) < 0:
        raise BrokenModel("a timer lies in the past after its Tick")
    for index in living:
        draft.clocks[index] += min(waits)
    for index in living:
        draft.handle(index, Tick())
        overdue = draft.clocks[index] >= draft.model.deadline_s
        if overdue and draft.stages[index] is Stage.BEGUN:
            raise BrokenModel(f"{PEERS[index]} has reported nothing by its deadline")


_VERBS: dict[str, Callable[[Draft, Any], None]] = {
    "deliver": _deliver,
    "deliver late": _deliver_late,
    "engine": _call,
    "land": _land,
    "sent": Draft.sent,
    "fail": lambda draft, write: draft.send_failed(write, WriteFate.FAILED),
    "filled": _filled,
    "dropped": lambda draft, write: draft.send_failed(write, WriteFate.BUSY),
    "doubt": lambda draft, write: draft.send_failed(write, WriteFate.UNKNOWN),
    "scatter": Draft.end_scatter,
    "cut": _cut,
    "disconnected": _disconnected,
    "notice": _notice,
    "time": _pass_time,
}


# ------------------------------------------------------------ faults


def _drop(draft: Draft, frame: Frame, fault: ModelFault) -> None:
    draft.frames.remove(frame)
    if fault is ModelFault.DELAY:
        draft.late.append(frame)


def _run_ahead(draft: Draft, index: int, fault: ModelFault) -> None:
    """Let one endpoint's clock run ahead of the others."""
    state, model, now = draft.runners[index], draft.model, draft.clocks[index]
    assert state is not None
    if fault is ModelFault.DEADLINE:
        to = model.deadline_s
    elif fault is ModelFault.SILENCE:
        to = now + model.times.silence_s
    else:
        to = state.wakeup or 0.0
    draft.clocks[index] = max(now, to)
    draft.handle(index, Tick())
    if fault is ModelFault.TICK:
        draft.excused |= draft.clocks[index] >= model.deadline_s


def _kill(draft: Draft, index: int, _: ModelFault) -> None:
    """Kill an endpoint. Its frames and submitted writes are still on their way."""
    draft.runners[index] = None
    draft.scripts[index] = len(draft.catalogue.scripts[index])
    draft.frames = [frame for frame in draft.frames if frame.to != index]
    draft.late = [frame for frame in draft.late if frame.to != index]
    draft.scatters = [scatter for scatter in draft.scatters if scatter.at != index]
    draft.probes = {pair for pair in draft.probes if pair[0] != index}
    for write, phase in list(draft.writes.items()):
        in_flight = phase in (ModelPhase.SUBMITTED, ModelPhase.STALLED)
        if index == SOURCE and (in_flight or phase is ModelPhase.DOUBTED):
            draft.writes[write] = ModelPhase.ORPHAN
        elif index == SOURCE:
            del draft.writes[write]
        elif in_flight and write.to == index:
            draft.writes[write] = ModelPhase.DOOMED


def _absent(draft: Draft, index: int, _: ModelFault) -> None:
    draft.scripts[index] = len(draft.catalogue.scripts[index])


_FAULTS: dict[ModelFault, Callable[[Draft, Any, ModelFault], None]] = {
    ModelFault.DROP: _drop,
    ModelFault.DROP_NOTE: _drop,
    ModelFault.DELAY: _drop,
    ModelFault.DUPLICATE: lambda draft, frame, _: draft.frames.append(frame),
    ModelFault.STALL: lambda draft, write, _: draft.writes.update({write: ModelPhase.STALLED}),
    ModelFault.CUT: lambda draft, target, _: _notice(draft, target),
    ModelFault.CANCEL_SOURCE: lambda draft, index, _: draft.handle(index, Cancel(ROOM)),
    ModelFault.CANCEL_TARGET: lambda draft, index, _: draft.handle(index, Cancel(ROOM)),
    ModelFault.KILL_SOURCE: _kill,
    ModelFault.KILL_TARGET: _kill,
    ModelFault.ABSENT: _absent,
    ModelFault.TICK: _run_ahead,
    ModelFault.DEADLINE: _run_ahead,
    ModelFault.SILENCE: _run_ahead,
    **dict.fromkeys(_FATES, lambda draft, write, fault: draft.send_failed(write, _FATES[fault])),
}


def describe(step: Step) -> str:
    """Return a step in words."""
    verb, thing, fault = step
    what = str(PEERS[thing]) if isinstance(thing, int) else str(thing)
    if fault is not None:
        return f"FAULT {fault.name} ({fault.value}): {what}"
    match verb:
        case "land" | "sent" | "fail" | "doubt" | "filled" | "dropped":
            return f"{what}: {verb}"
        case "scatter":
            return f"scatter {thing.op} of slot {thing.slot} ends at {PEERS[thing.at]}"
        case "disconnected":
            return f"disconnected {PEERS[thing[1]]}, {PEERS[thing[0]]} is told"
        case "time":
            return "time passes to the earliest timer"
    return f"{verb} {what}"
