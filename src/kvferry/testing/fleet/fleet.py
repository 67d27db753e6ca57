"""The fleet's own side: starts ranks, tells them what to do, and hurts them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.endpoint.config import EndpointConfig
from kvferry.ids import Room
from kvferry.layout.layout import Layout
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Done, Outcome
from kvferry.security.keys import ClusterKey
from kvferry.testing.fleet.allot import Allotment
from kvferry.testing.fleet.process import RankError, RankProcess
from kvferry.testing.fleet.worker import RankSpec

# How long a room may take in ``carry``, and its release after that.
CARRY_S = 35.0
RELEASE_S = 10.0


class FleetSide(NamedTuple):
    """An instance to start: its layout, and how many pages each rank has."""

    name: str
    layout: Layout
    num_pages: int
    config: EndpointConfig = EndpointConfig()
    num_rows: int = 16


class Cut(NamedTuple):
    """How a room is pushed: so many tokens at a time, and of each chunk so many layers.

    With ``layers``, neither tokens nor layers come in their order.
    """

    tokens: int
    layers: int | None = None


class Fleet:
    """A prefill instance and decode instances, each rank a process.

    ``spares`` are further prefill instances; what concerns one of them says so by its name.
    """

    def __init__(
        self,
        prefill: FleetSide,
        *decodes: FleetSide,
        spares: Sequence[FleetSide] = (),
        transport: str = "shm",
        seed: int = 0,
        key_file: str | None = None,
        device: str = "cpu",
    ) -> None:
        rng = random.Random(seed)
        self._key = ClusterKey.read(key_file) if key_file else None
        self.discovery = DiscoveryServer("127.0.0.1", 0, self._key).start()
        self.url = self.discovery.url
        self._template = RankSpec(
            role="",
            name="",
            rank=0,
            layout=prefill.layout,
            transport=transport,
            discovery=self.url,
            num_pages=1,
            key_file=key_file,
            device=device,
        )
        self.prefills = {side.name: side for side in (prefill, *spares)}
        self.decodes = {side.name: side for side in decodes}
        self.sides = self.prefills | self.decodes
        self.allotments = {
            name: Allotment(side.num_pages, side.num_rows, side.layout.page_tokens, rng)
            for name, side in self.sides.items()
        }
        self.members = {name: self._start_all(side) for name, side in self.sides.items()}
        try:
            answers(self.ranks)
        except RankError:
            self.close()
            raise

    @property
    def prefill(self) -> FleetSide:
        """The first prefill instance."""
        return next(iter(self.prefills.values()))

    @property
    def sources(self) -> list[RankProcess]:
        """Ranks of the first prefill instance."""
        return self.members[self.prefill.name]

    @property
    def targets(self) -> dict[str, list[RankProcess]]:
        """Ranks of each decode instance."""
        return {name: self.members[name] for name in self.decodes}

    @property
    def ranks(self) -> list[RankProcess]:
        """Every process."""
        return [rank for ranks in self.members.values() for rank in ranks]

    def _start_all(self, side: FleetSide) -> list[RankProcess]:
        role = "source" if side.name in self.prefills else "target"
        spec = replace(
            self._template,
            role=role,
            name=side.name,
            layout=side.layout,
            num_pages=side.num_pages,
            num_rows=side.num_rows,
            config=side.config,
        )
        return [RankProcess(replace(spec, rank=rank)) for rank in range(side.layout.num_ranks)]

    def restart(self, dead: RankProcess) -> RankProcess:
        """Another process under the same name, in the dead one's place."""
        fresh = RankProcess(dead.spec)
        self.members[dead.spec.name][dead.spec.rank] = fresh
        dead.end()
        fresh.answer()
        return fresh

    def all(self, ranks: list[RankProcess], method: str, *args: Any) -> list[Any]:
        """Ask several ranks at once. Raises the first error when all have answered."""
        for rank in ranks:
            rank.begin(method, *args)
        return answers(ranks)

    # ------------------------------------------------------------ rooms

    def parties(self, decode: str, prefill: str | None = None) -> list[RankProcess]:
        """The ranks that a room between two instances concerns, targets first."""
        return [*self.members[decode], *self.members[prefill or self.prefill.name]]

    def fill(self, room: Room, seed: int, num_tokens: int, prefill: str | None = None) -> None:
        """Every source computes the room."""
        name = prefill or self.prefill.name
        where = self.allotments[name].take(room, num_tokens)
        self.all(self.members[name], "fill", room, seed, where, num_tokens)

    def place(self, room: Room, num_tokens: int) -> None:
        """Every source has pages for the room, with whatever is in them."""
        where = self.allotments[self.prefill.name].take(room, num_tokens)
        self.all(self.sources, "place", room, where)

    def receive(
        self,
        room: Room,
        decode: str,
        request: Request,
        deadline_s: float = 30.0,
        prefill: str | None = None,
    ) -> None:
        """Every target of an instance asks for the room."""
        where = self.allotments[decode].take(room, request.num_tokens)
        args = (room, prefill or self.prefill.name, request, where, deadline_s)
        self.all(self.members[decode], "receive", *args)

    def send(
        self,
        room: Room,
        num_tokens: int,
        *,
        chunk: int | Cut | None = None,
        metadata: bytes = b"",
        deadline_s: float = 30.0,
        prefill: str | None = None,
    ) -> float:
        """Every source opens, pushes and closes the room; when the first began."""
        sources = self.members[prefill or self.prefill.name]
        self.all(sources, "open", room, deadline_s)
        size, layers = chunk if isinstance(chunk, Cut) else Cut(chunk or max(1, num_tokens))
        return float(min(self.all(sources, "push_all", room, num_tokens, size, metadata, layers)))

    def outcomes(
        self, room: Room, ranks: list[RankProcess], timeout_s: float = 30.0
    ) -> list[Outcome]:
        """How the room ended at each of those ranks."""
        return self.all(ranks, "outcome", room, timeout_s)

    def carry(
        self,
        room: Room,
        request: Request,
        *,
        seed: int,
        decode: str | None = None,
        prefill: str | None = None,
        chunk: int | Cut | None = None,
        prefill_first: bool = False,
    ) -> None:
        """One room from start to end, every byte checked. Raises ``RankError``."""
        name = decode or next(iter(self.decodes))
        metadata = f"token of {room}".encode()
        targets = self.targets[name]
        self.all(targets, "clear")
        self.fill(room, seed, request.num_tokens, prefill)
        if not prefill_first:
            self.receive(room, name, request, prefill=prefill)
        self.send(room, request.num_tokens, chunk=chunk, metadata=metadata, prefill=prefill)
        if prefill_first:
            self.receive(room, name, request, prefill=prefill)
        self.demand_done(room, self.parties(name, prefill), CARRY_S)
        self.demand_right(name, [(room, seed, request)])
        if self.all(targets, "metadata", room) != [metadata] * len(targets):
            raise RankError(f"{room!r} came with other metadata")
        self.finish(room, name, prefill)

    def demand_done(self, room: Room, ranks: list[RankProcess], timeout_s: float) -> None:
        """Wait for the room at those ranks. Raises ``RankError`` unless it is done at each."""
        for rank, outcome in zip(ranks, self.outcomes(room, ranks, timeout_s), strict=True):
            if not isinstance(outcome, Done):
                raise RankError(f"{rank} ended {room!r} with {outcome}")

    def demand_right(self, decode: str, rooms: list[tuple[Room, int, Request]]) -> None:
        """Raises ``RankError`` unless an instance's pools have these rooms and nothing else."""
        problems = self.all(self.targets[decode], "problem_among", rooms)
        for rank, problem in zip(self.targets[decode], problems, strict=True):
            if problem:
                raise RankError(f"{rank} has {problem}")

    def finish(self, room: Room, decode: str, prefill: str | None = None) -> None:
        """Wait until every rank has released the room, and forget it."""
        self.all(self.parties(decode, prefill), "wait_released", room, RELEASE_S)
        self.forget(room, decode, prefill)

    def forget(self, room: Room, decode: str, prefill: str | None = None) -> None:
        """Drop what is kept of a room that is over; its pages may be used again."""
        self.all(self.parties(decode, prefill), "forget", room)
        for name in (prefill or self.prefill.name, decode):
            self.allotments[name].give_back(room)

    def leftovers(self) -> dict[str, dict[str, int]]:
        """Tables that are not empty, by rank."""
        found = {}
        for rank in self.ranks:
            sizes = {key: size for key, size in rank.ask("tables").items() if size}
            if sizes:
                found[repr(rank)] = sizes
        return found

    # ------------------------------------------------------------ life

    def start_discovery(self) -> None:
        """A stopped discovery comes back at the same place, and knows nobody."""
        port = int(self.url.rpartition(":")[2])
        self.discovery = DiscoveryServer("127.0.0.1", port, self._key).start()

    def close(self) -> None:
        """End every process."""
        for rank in self.ranks:
            rank.hang_up()
        for rank in self.ranks:
            rank.end()
        self.discovery.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def answers(ranks: list[RankProcess]) -> list[Any]:
    """What each of those ranks was asked for, or the first error among them."""
    found: list[Any] = []
    errors: list[RankError] = []
    for rank in ranks:
        try:
            found.append(rank.answer())
        except RankError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found
