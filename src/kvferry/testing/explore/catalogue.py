"""The catalogue of one exploration: states of runners, frames, writes and scatters, each once.

A runner with its machine is deterministic and does no IO, so its answer depends only on its state,
the event and its clock. The catalogue asks the real runner once for each of these and remembers the
answer. Everything in it exists once and is compared by identity, which makes states of the world
cheap to compare.
"""

# The ports are documented in ``endpoint/runner/runner.py``.
# ruff: noqa: D102
from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.endpoint.runner.runner import MachineRunner
from kvferry.endpoint.runner.sessions import SessionRecord
from kvferry.ids import Op, Peer, Room, Session
from kvferry.plan.plan import Block
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
    Report,
    Scatter,
    Write,
)
from kvferry.protocol.messages import Arrived, Envelope
from kvferry.protocol.outcome import Done
from kvferry.testing.explore.model import METADATA, PEERS, SOURCE, ExploredModel
from kvferry.testing.explore.snapshot import copy_of, key_of
from kvferry.testing.sim.checks import table_sizes

# One layer of one group at one token: the smallest thing that a write lands.
Atom = tuple[str, int, int]


class BrokenModel(Exception):
    """A broken promise; the message says which."""


@dataclass(eq=False, slots=True)
class Item:
    """A thing that exists once and is compared by identity; ``number`` orders things."""

    number: int

    def __lt__(self, other: Item) -> bool:
        return self.number < other.number


@dataclass(eq=False, slots=True)
class Frame(Item):
    """A frame to the endpoint ``to``. Its ``seq`` is 0 if it has no order."""

    to: int
    envelope: Envelope

    def overtakes(self, other: Frame) -> bool:
        """Return whether the other frame was sent earlier in the same direction of a link."""
        mine, its = self.envelope, other.envelope
        return 0 < its.seq < mine.seq and (self.to, mine.session) == (other.to, its.session)

    def __str__(self) -> str:
        number = f" #{self.envelope.seq}" if self.envelope.seq else ""
        body = self.envelope.body
        serial = f" serial {body.serial}" if isinstance(body, Arrived) else ""
        return f"{type(body).__name__}{number}{serial} {self.envelope.sender}→{PEERS[self.to]}"


@dataclass(eq=False, slots=True)
class ModelWrite(Item):
    """A write as the transport sees it, or an early gather that may become one."""

    op: Op
    to: int
    atoms: tuple[Atom, ...]
    slot: int | None
    serial: int | None
    local_slot: int | None

    def shares_slot(self, other: ModelWrite) -> bool:
        """Return whether both use one slot, at the target or at the source."""
        there = self.slot is not None and (self.to, self.slot) == (other.to, other.slot)
        return there or (self.local_slot is not None and self.local_slot == other.local_slot)

    def __str__(self) -> str:
        where = "pages" if self.slot is None else f"slot {self.slot} serial {self.serial}"
        if self.slot is None and self.local_slot is not None:
            where = f"from slot {self.local_slot}, not posted"
        return f"write {self.op} to {PEERS[self.to]} {where}"


@dataclass(eq=False, slots=True)
class ModelScatter(Item):
    """A scatter as the copy engine sees it."""

    op: Op
    at: int
    atoms: tuple[Atom, ...]
    slot: int
    serial: int


# A runner's call of a port: the method's name, and the thing that it concerns.
Effect = tuple[str, Any]


@dataclass(eq=False, slots=True)
class RunnerState(Item):
    """A state of a runner and its machine, with the answers that are known."""

    runner: MachineRunner[Any, Any]
    wakeup: float | None
    answers: dict[tuple[Hashable, float], tuple[RunnerState, tuple[Effect, ...]]] = field(
        default_factory=dict
    )

    @property
    def machine(self) -> Any:
        """The state's machine, which must not be stepped."""
        return self.runner.machine

    def ignores(self, frame: Frame) -> bool:
        """Return whether a frame on its way to this runner can never change anything.

        That is so for an unnumbered frame of a session that a target has dropped: a target never
        resumes a session, and does not answer such a frame.
        """
        if frame.envelope.seq or frame.to == SOURCE:
            return False
        return frame.envelope.session not in self.machine.links

    def has_promised(self, write: ModelWrite) -> bool:
        """Return whether the target has granted a credit for this write that is still unused."""
        accounts = self.machine.credits.accounts.values()
        credit = write.serial, write.slot
        return any(credit in account.outstanding.items() for account in accounts)

    def leftovers(self) -> list[str]:
        """Return the tables that are not empty."""
        return [f"{size} {name}" for name, size in table_sizes(self.machine).items() if size]


class RecordingPorts:
    """All ports of a runner: they answer what needs no time, and record everything else."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._runner: MachineRunner[Any, Any] = None  # type: ignore[assignment]
        self._effects: list[Effect] = []

    def effects_of(
        self, runner: MachineRunner[Any, Any], event: Event, now: float
    ) -> tuple[Effect, ...]:
        """Let a runner handle an event, and return its calls of ports."""
        self._runner, self._effects = runner, []
        runner.take(event, now)
        return tuple(self._effects)

    def _record(self, verb: str, thing: Any = None) -> None:
        self._effects.append((verb, thing))

    def send(self, peer: Peer, envelope: Envelope) -> None:
        self._record("send", self._catalogue.item(Frame, PEERS.index(peer), envelope))

    def choose(self, action: Choose) -> None:
        staged = (self._catalogue.model.staged,) * len(action.blocks)
        self._runner.answer(Chosen(action.ticket, staged))

    def write(self, action: Write) -> None:
        serial = _serial(action.note)
        self._record("write", self._write(action, action.slot, serial, action.local_slot))

    def gather(self, action: Gather) -> None:
        self._record("gather", self._write(action, None, None, action.local_slot))

    def _write(
        self, action: Write | Gather, slot: int | None, serial: int | None, local_slot: int | None
    ) -> ModelWrite:
        to, atoms = PEERS.index(action.transfer.peer), self._catalogue.atoms(action.blocks)
        return self._catalogue.item(ModelWrite, action.op, to, atoms, slot, serial, local_slot)

    def post_gathered(self, action: Post) -> None:
        self._record("post", (action.op, action.slot, _serial(action.note)))

    def discard(self, op: Op) -> None:
        self._record("discard", op)

    def scatter(self, action: Scatter) -> None:
        at, atoms = PEERS.index(self._runner.machine.me), self._catalogue.atoms(action.blocks)
        what = action.op, at, atoms, action.slot, action.serial
        self._record("scatter", self._catalogue.item(ModelScatter, *what))

    def report(self, action: Report) -> None:
        outcome = action.outcome
        me, is_done = self._runner.machine.me, isinstance(outcome, Done)
        if me != PEERS[SOURCE] and isinstance(outcome, Done) and outcome.metadata != METADATA:
            raise BrokenModel(f"{me} is Done without the metadata")
        self._record("report", is_done)

    def release(self, room: Room) -> None:
        self._record("release")

    def start_probing(self, record: SessionRecord) -> None:
        self._record("start_probing", PEERS.index(record.peer))

    def stop_probing(self, record: SessionRecord) -> None:
        self._record("stop_probing", PEERS.index(record.peer))

    def connect(self, action: Connect) -> None:
        if not self._runner.machine.exposed:
            self._runner.answer(MemoryReached(action.session, action.transports[0].name))

    def cut(self, session: Session) -> None:
        """Let submitted writes continue to their end."""

    def forget(self, session: Session) -> None:
        """Do nothing: the model keeps nothing of a session."""

    def hint_death(self, record: SessionRecord) -> None:
        """Do nothing: the model reports deaths at any time, without a probe."""


def _serial(note: Envelope) -> int | None:
    assert isinstance(note.body, Arrived)
    return note.body.serial


I = TypeVar("I", bound=Item)  # noqa: E741


class Catalogue:
    """States of runners, frames, writes and scatters of one exploration."""

    def __init__(self, model: ExploredModel) -> None:
        self.model = model
        self.scripts = model.scripts()
        self.num_states = 0
        plan = reshard(*model.layouts())
        self._spec = plan.spec
        # The atoms that must land at each target.
        self.owed = {
            index: frozenset(self.atoms(plan.blocks(0, peer.rank, model.request)))
            for index, peer in enumerate(PEERS)
            if index != SOURCE
        }
        self._ports = RecordingPorts(self)
        self._items: dict[Hashable, Any] = {}
        self._states: dict[Hashable, RunnerState] = {}

    def item(self, kind: type[I], *values: Any) -> I:
        """Return the one item of that kind with these values."""
        found: I | None = self._items.get((kind, values))
        if found is None:
            found = self._items[kind, values] = kind(len(self._items), *values)
        return found

    def first_states(self) -> tuple[RunnerState, ...]:
        """Return the states of the runners before anything has happened."""
        return tuple(map(self._state, self.model.runners(self._ports)))

    def _state(self, runner: MachineRunner[Any, Any]) -> RunnerState:
        """Return the state of a runner. The state may keep the runner, so do not step it again."""
        key = key_of(runner)
        state = self._states.get(key)
        if state is None:
            runner.machine.check()
            state = RunnerState(self.num_states, runner, runner.machine.wakeup())
            self._states[key] = state
            self.num_states += 1
        return state

    def step(
        self, state: RunnerState, cause: Event | Frame, now: float
    ) -> tuple[RunnerState, tuple[Effect, ...]]:
        """Return the next state and the calls of ports. Any exception breaks a promise."""
        question = (cause, now)
        answer = state.answers.get(question)
        if answer is None:
            event = Received(cause.envelope) if isinstance(cause, Frame) else cause
            answer = state.answers[question] = self._ask(state, event, now)
        return answer

    def _ask(
        self, state: RunnerState, event: Event, now: float
    ) -> tuple[RunnerState, tuple[Effect, ...]]:
        runner = copy_of(state.runner)
        try:
            effects = self._ports.effects_of(runner, event, now)
            return self._state(runner), effects
        except BrokenModel:
            raise
        except Exception as error:
            me = runner.machine.me
            raise BrokenModel(f"{me} raised {type(error).__name__}: {error}") from error

    def atoms(self, blocks: Iterable[Block]) -> tuple[Atom, ...]:
        """Return the atoms of blocks in order."""
        return tuple(
            sorted(
                (block.group, layer, token)
                for block in blocks
                for layer in self._spec.group(block.group).layers_in(block.layers)
                for token in range(block.tokens.first, block.tokens.end)
            )
        )
