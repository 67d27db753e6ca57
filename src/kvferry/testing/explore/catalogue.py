"""Everything that paths have in common, each thing once and under a number.

A runner with its machine is deterministic and without IO, so what it answers depends on
its state, the event and its clock alone. The catalogue asks the real one once for each
such triple and remembers the answer; a world then is a handful of numbers, and
millions of steps through the same states cost one ``take`` each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from kvferry.endpoint.runner.runner import MachineRunner
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Op, Peer, Room, Session
from kvferry.plan.plan import Block, Plan
from kvferry.plan.reshard import reshard
from kvferry.protocol.events import (
    Choose,
    Chosen,
    Connect,
    Event,
    Gather,
    MemoryReached,
    Post,
    Received,
    Scatter,
    Write,
)
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import Arrived, Envelope
from kvferry.protocol.outcome import Done, Outcome
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.states import LinkState
from kvferry.protocol.target import TargetMachine
from kvferry.testing.explore.model import METADATA, PEERS, SOURCE, ExploredModel
from kvferry.testing.explore.snapshot import copy_of, key_of

T = TypeVar("T", bound=Hashable)

# One layer of one group at one token: the smallest thing that lands.
Atom = tuple[str, int, int]


class BrokenModel(Exception):
    """A promise was broken; the message says which."""


class Frame(NamedTuple):
    """A frame for the endpoint ``to``. ``seq`` is 0 for what has no order."""

    to: int
    envelope: Envelope

    @property
    def stream(self) -> tuple[int, Hashable]:
        """What numbered frames have an order within."""
        return (self.to, self.envelope.session)

    def __str__(self) -> str:
        number = f" #{self.envelope.seq}" if self.envelope.seq else ""
        body = self.envelope.body
        serial = f" serial {body.serial}" if isinstance(body, Arrived) else ""
        return f"{type(body).__name__}{number}{serial} {self.envelope.sender}→{PEERS[self.to]}"


class WriteState(NamedTuple):
    """A write as the transport sees it."""

    op: Op
    to: int
    atoms: tuple[Atom, ...]
    slot: int | None
    serial: int | None
    local_slot: int | None

    def shares_a_slot_with(self, other: WriteState) -> bool:
        """Whether both use one slot, at the target or here."""
        there = self.slot is not None and (self.to, self.slot) == (other.to, other.slot)
        return there or (self.local_slot is not None and self.local_slot == other.local_slot)

    def __str__(self) -> str:
        where = "pages" if self.slot is None else f"slot {self.slot} serial {self.serial}"
        if self.slot is None and self.local_slot is not None:
            where = f"from slot {self.local_slot}, not posted"
        return f"write {self.op} to {PEERS[self.to]} {where}"


class ScatterState(NamedTuple):
    """A scatter as the copy engine sees it."""

    op: Op
    at: int
    atoms: tuple[Atom, ...]
    slot: int
    serial: int


class EffectKind(Enum):
    """What an action means for the world."""

    FRAME = "frame"
    WRITE = "write"
    GATHER = "gather"
    POST = "post"
    DISCARD = "discard"
    SCATTER = "scatter"
    START_PROBING = "start_probing"
    STOP_PROBING = "stop_probing"
    DONE = "done"
    FAILED = "failed"
    RELEASE = "release"


Effect = tuple[EffectKind, int]
Answer = tuple[int, tuple[Effect, ...]]


@dataclass(slots=True)
class Numbers(Generic[T]):
    """Gives equal things one number."""

    things: list[T]
    known: dict[T, int]

    def of(self, thing: T) -> int:
        """The thing's number."""
        number = self.known.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


class Recorder:
    """All the ports of whichever runner is asked: what it wants from the world."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._runner: MachineRunner[Any, Any] | None = None
        self._effects: list[Effect] = []
        self._now = 0.0

    def of(self, runner: MachineRunner[Any, Any], event: Event, now: float) -> tuple[Effect, ...]:
        """What a runner asks for."""
        self._runner, self._effects, self._now = runner, [], now
        runner.take(event, now)
        return tuple(self._effects)

    @property
    def _machine(self) -> Machine:
        assert self._runner is not None
        machine: Machine = self._runner.machine
        return machine

    def send(self, peer: Peer, envelope: Envelope) -> None:
        """A frame is under way."""
        frame = Frame(PEERS.index(peer), envelope)
        self._effects.append((EffectKind.FRAME, self._catalogue.frames.of(frame)))

    def choose(self, action: Choose) -> None:
        """Everything goes the model's way, at once."""
        assert self._runner is not None
        staged = (self._catalogue.model.staged,) * len(action.blocks)
        self._runner.take(Chosen(action.ticket, staged), self._now)

    def write(self, action: Write) -> None:
        """A write is under way."""
        self._effects.append((EffectKind.WRITE, self._catalogue.number_write(action)))

    def gather(self, action: Gather) -> None:
        """A local slot is being filled."""
        self._effects.append((EffectKind.GATHER, self._catalogue.number_gather(action)))

    def post_gathered(self, action: Post) -> None:
        """What was gathered is to be written. The catalogue knows its gather by its op."""
        self._effects.append((EffectKind.POST, self._catalogue.number_post(action)))

    def discard(self, op: Op) -> None:
        """What was gathered is to be let go of."""
        self._effects.append((EffectKind.DISCARD, op))

    def scatter(self, action: Scatter) -> None:
        """A scatter is under way."""
        self._effects.append(
            (EffectKind.SCATTER, self._catalogue.number_scatter(self._machine.me, action))
        )

    def report(self, room: Room, outcome: Outcome) -> None:
        """The room has ended for its caller."""
        if not isinstance(outcome, Done):
            self._effects.append((EffectKind.FAILED, 0))
            return
        me = self._machine.me
        if me != PEERS[SOURCE] and outcome.metadata != METADATA:
            raise BrokenModel(f"{me} is Done without the metadata")
        self._effects.append((EffectKind.DONE, 0))

    def release(self, room: Room) -> None:
        """The room's pages are the caller's again."""
        self._effects.append((EffectKind.RELEASE, 0))

    def start_probing(self, record: SessionRecord) -> None:
        """Somebody wants to know whether a peer is gone."""
        self._effects.append((EffectKind.START_PROBING, PEERS.index(record.peer)))

    def stop_probing(self, peer: Peer, incarnation: int) -> None:
        """Nobody wants to know any more."""
        self._effects.append((EffectKind.STOP_PROBING, PEERS.index(peer)))

    def connect(self, action: Connect) -> None:
        """Memory is reached at once here."""
        if not self._machine.exposed:
            assert self._runner is not None
            reached = MemoryReached(action.session, action.transports[0].name)
            self._runner.take(reached, self._now)

    def cut(self, session: Session) -> None:
        """Writes that were handed over go on to their end."""

    def forget(self, session: Session) -> None:
        """Nothing is kept of a session here."""

    def hint_death(self, peer: Peer, incarnation: int, metadata: bytes) -> None:
        """The world tells of deaths at any time, asked or not."""


class Catalogue:
    """States of runners, events, frames, writes and scatters of one exploration."""

    def __init__(self, model: ExploredModel) -> None:
        self.model = model
        self.plan: Plan = reshard(*model.layouts())
        self.frames: Numbers[Frame] = Numbers([], {})
        self.writes: Numbers[WriteState] = Numbers([], {})
        self.posts: Numbers[tuple[Op, int, int | None]] = Numbers([], {})
        self.scatters: Numbers[ScatterState] = Numbers([], {})
        self.events: Numbers[Event] = Numbers([], {})
        self.scripts = tuple(tuple(map(self.events.of, script)) for script in model.scripts())
        self.runners: list[MachineRunner[Any, Any]] = []
        self._recorder = Recorder(self)
        self._keys: dict[Hashable, int] = {}
        self._answers: dict[tuple[int, int, float], Answer] = {}
        self._arrivals: dict[int, int] = {}
        self._wakeups: dict[int, float | None] = {}
        self._owed = {
            rank: frozenset(self.atoms(self.plan.blocks(0, rank, model.request))) for rank in (0, 1)
        }

    def first(self) -> tuple[int, ...]:
        """The states before anything has happened."""
        return tuple(map(self.add, self.model.runners(self._recorder)))

    def add(self, runner: MachineRunner[Any, Any]) -> int:
        """The number of a runner's state. It is kept and must not be stepped again."""
        number = self._keys.setdefault(key_of(runner), len(self.runners))
        if number == len(self.runners):
            runner.machine.check()
            self.runners.append(runner)
        return number

    def step(self, state: int, event: int, now: float) -> Answer:
        """What a runner in that state answers. Whatever it raises breaks a promise."""
        question = (state, event, now)
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = self._ask(state, self.events.things[event], now)
        return answer

    def _ask(self, state: int, event: Event, now: float) -> Answer:
        runner = copy_of(self.runners[state])
        try:
            effects = self._recorder.of(runner, event, now)
            return self.add(runner), effects
        except BrokenModel:
            raise
        except Exception as error:
            me = runner.machine.me
            raise BrokenModel(f"{me} raised {type(error).__name__}: {error}") from error

    def number_write(self, write: Write) -> int:
        """The number of a write."""
        note, to = write.note, PEERS.index(write.transfer.peer)
        assert isinstance(note.body, Arrived)
        return self.writes.of(
            WriteState(
                write.op,
                to,
                self.atoms(write.blocks),
                write.slot,
                note.body.serial,
                write.local_slot,
            )
        )

    def number_gather(self, gather: Gather) -> int:
        """The number of a write that is only gathered."""
        to, atoms = PEERS.index(gather.transfer.peer), self.atoms(gather.blocks)
        return self.writes.of(WriteState(gather.op, to, atoms, None, None, gather.local_slot))

    def number_post(self, post: Post) -> int:
        """The number of a posting."""
        assert isinstance(post.note.body, Arrived)
        return self.posts.of((post.op, post.slot, post.note.body.serial))

    def posted(self, gather: int, post: int) -> int:
        """The number of the write that a gather becomes."""
        _, slot, serial = self.posts.things[post]
        return self.writes.of(self.writes.things[gather]._replace(slot=slot, serial=serial))

    def number_scatter(self, me: Peer, scatter: Scatter) -> int:
        """The number of a scatter."""
        at, atoms = PEERS.index(me), self.atoms(scatter.blocks)
        return self.scatters.of(ScatterState(scatter.op, at, atoms, scatter.slot, scatter.serial))

    # ------------------------------------------------------------ what worlds ask about

    def arrival(self, frame: int) -> int:
        """The event of that frame's arrival."""
        if frame not in self._arrivals:
            self._arrivals[frame] = self.events.of(Received(self.frames.things[frame].envelope))
        return self._arrivals[frame]

    def is_moot(self, machines: Sequence[int], number: int) -> bool:
        """Whether a frame in flight can never change anything, so that it need not be kept.

        That is so for an unnumbered frame to a target that has dropped the
        frame's session: a target never takes a session up again, and answers
        such a frame with nothing.
        """
        frame = self.frames.things[number]
        if frame.envelope.seq or frame.to == SOURCE:
            return False
        return frame.envelope.session not in self.runners[machines[frame.to]].machine.links

    def wakeup(self, state: int) -> float | None:
        """When a machine in that state wants to be woken."""
        if state not in self._wakeups:
            self._wakeups[state] = self.runners[state].machine.wakeup()
        return self._wakeups[state]

    def owed(self, index: int) -> frozenset[Atom]:
        """What must land at a target."""
        return self._owed[PEERS[index].rank]

    def atoms(self, blocks: Iterable[Block]) -> tuple[Atom, ...]:
        """What blocks consist of."""
        return tuple(
            sorted(
                (block.group, layer, token)
                for block in blocks
                for layer in self.plan.spec.group(block.group).layers_in(block.layers)
                for token in range(block.tokens.first, block.tokens.end)
            )
        )

    def promised(self, state: int, slot: int, serial: int | None) -> bool:
        """Whether a target in that state has promised the slot to the source under that serial."""
        machine = self.runners[state].machine
        assert isinstance(machine, TargetMachine)
        accounts = machine.credits.accounts.values()
        return any((serial, slot) in account.outstanding.items() for account in accounts)

    def leftovers(self, state: int) -> list[str]:
        """Tables that should be empty and are not."""
        machine = self.runners[state].machine
        tables: dict[str, object] = {
            "rooms": getattr(machine, "rooms", None),
            "lost links": [x for x in machine.links.values() if x.state is LinkState.LOST],
        }
        if isinstance(machine, SourceMachine):
            tables["writing"] = machine.inflight.writes
            tables["local slots"] = machine.config.local_slots - len(machine.local_slots)
        if isinstance(machine, TargetMachine):
            tables["scattering"] = machine.scatters.under_way
            tables["accounts"] = machine.credits.accounts
            tables["slots"] = machine.staging.num_slots - len(machine.credits.free)
        return [f"{name} {table!r}" for name, table in tables.items() if table]
