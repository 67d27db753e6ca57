"""The fleet: starts ranks, allocates their pages, and gives them rooms to carry."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
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
from kvferry.testing.faulty_transport import ContentFault
from kvferry.testing.fleet.pools import RoomPages
from kvferry.testing.fleet.process import RankError, RankProcess
from kvferry.testing.fleet.worker import RankSpec

# Time limits of ``carry``: for the room, and for its release after that.
CARRY_S = 35.0
RELEASE_S = 10.0


class PageAllocator:
    """The free pages and state rows of an instance, the same at each rank and in each group.

    ``page_tokens`` are those of the smallest pages; groups of larger pages use the first of a
    room's pages. A room gets random pages, or the lowest free ones in order if there is no ``rng``.
    """

    def __init__(self, num_pages: int, num_rows: int, page_tokens: int, rng: Random | None) -> None:
        self._page_tokens = page_tokens
        self._pages = list(range(num_pages))
        self._rows = list(range(num_rows))
        self._rng = rng
        self._allocated: dict[Room, RoomPages] = {}

    def allocate(self, room: Room, num_tokens: int) -> RoomPages:
        """Allocate pages and a row for a room."""
        num_pages = -(-num_tokens // self._page_tokens)
        if room in self._allocated or not self.has(num_tokens):
            have = f"{len(self._pages)} pages and {len(self._rows)} rows"
            raise ValueError(f"room {room!r} needs {num_pages} pages, and {have} are free")
        for free in (self._pages, self._rows):
            if self._rng is None:
                free.sort(reverse=True)
            else:
                self._rng.shuffle(free)
        pages = tuple(self._pages.pop() for _ in range(num_pages))
        self._allocated[room] = RoomPages(pages, self._rows.pop())
        return self._allocated[room]

    def free(self, room: Room) -> None:
        """Free a room's pages: it was released, or its process is dead."""
        where = self._allocated.pop(room, None)
        if where:
            self._pages += where.pages
            assert where.row is not None
            self._rows.append(where.row)

    def has(self, num_tokens: int) -> bool:
        """Return whether a room of that length fits."""
        return num_tokens <= len(self._pages) * self._page_tokens and bool(self._rows)


class FleetSide(NamedTuple):
    """An instance to start: its layout, and the pages and state rows of each rank.

    Each rank of a prefill instance makes one ``fault``. ``device`` is that of the fleet unless
    given.
    """

    name: str
    layout: Layout
    num_pages: int
    config: EndpointConfig = EndpointConfig()
    num_rows: int = 16
    fault: ContentFault | None = None
    device: str | None = None


class Cut(NamedTuple):
    """How to push a room: the tokens of each chunk, and the layers of each push.

    With ``layers``, chunks and layers are pushed out of order.
    """

    tokens: int
    layers: int | None = None


class Fleet:
    """A prefill instance and decode instances, each rank a process.

    ``spares`` are further prefill instances, which methods select by the name ``prefill``. Rooms
    get random pages if ``fragmented``, else the lowest free ones: one room at a time then has
    consecutive pages.
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
        fragmented: bool = True,
    ) -> None:
        rng = Random(seed) if fragmented else None
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
        self.allocators = {
            name: PageAllocator(side.num_pages, side.num_rows, side.layout.smallest_page, rng)
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
        """The ranks of the first prefill instance."""
        return self.members[self.prefill.name]

    @property
    def targets(self) -> dict[str, list[RankProcess]]:
        """The ranks of each decode instance."""
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
            fault=side.fault,
            device=side.device or self._template.device,
        )
        return [RankProcess(replace(spec, rank=rank)) for rank in range(side.layout.num_ranks)]

    def restart(self, dead: RankProcess) -> RankProcess:
        """Start another process with the same name in the place of a dead one."""
        fresh = RankProcess(dead.spec)
        self.members[dead.spec.name][dead.spec.rank] = fresh
        dead.end()
        fresh.answer()
        return fresh

    def all(self, ranks: list[RankProcess], method: str, *args: Any) -> list[Any]:
        """Ask several ranks at once, and raise the first error when all have answered."""
        for rank in ranks:
            rank.begin(method, *args)
        return answers(ranks)

    # ------------------------------------------------------------ rooms

    def parties(self, decode: str, prefill: str | None = None) -> list[RankProcess]:
        """Return the ranks of a room between two instances, targets first."""
        return [*self.members[decode], *self.members[prefill or self.prefill.name]]

    def fill(self, room: Room, seed: int, num_tokens: int, prefill: str | None = None) -> None:
        """Allocate a room at every source, and fill its pages and state rows."""
        name = prefill or self.prefill.name
        where = self.allocators[name].allocate(room, num_tokens)
        self.all(self.members[name], "fill", room, seed, where, num_tokens)

    def place(self, room: Room, num_tokens: int) -> None:
        """Allocate a room at every source without filling its pages."""
        where = self.allocators[self.prefill.name].allocate(room, num_tokens)
        self.all(self.sources, "place", room, where)

    def receive(
        self,
        room: Room,
        decode: str,
        request: Request,
        deadline_s: float = 30.0,
        prefill: str | None = None,
    ) -> None:
        """Receive the room at every target of an instance."""
        where = self.allocators[decode].allocate(room, request.num_tokens)
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
        """Open, push and close the room at every source; return when the first began."""
        sources = self.members[prefill or self.prefill.name]
        self.all(sources, "open", room, deadline_s)
        size, layers = chunk if isinstance(chunk, Cut) else Cut(chunk or max(1, num_tokens))
        return float(min(self.all(sources, "push_all", room, num_tokens, size, metadata, layers)))

    def outcomes(
        self, room: Room, ranks: list[RankProcess], timeout_s: float = 30.0
    ) -> list[Outcome]:
        """Return how the room ended at each of these ranks."""
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
        """Carry one room from start to end and check every byte. Raises ``RankError``."""
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
        """Raise ``RankError`` unless the room ends well at each of these ranks."""
        for rank, outcome in zip(ranks, self.outcomes(room, ranks, timeout_s), strict=True):
            if not isinstance(outcome, Done):
                raise RankError(f"{rank} ended {room!r} with {outcome}")

    def demand_right(self, decode: str, rooms: list[tuple[Room, int, Request]]) -> None:
        """Raise ``RankError`` unless an instance's pools have these rooms and nothing else."""
        problems = self.all(self.targets[decode], "problem_among", rooms)
        for rank, problem in zip(self.targets[decode], problems, strict=True):
            if problem:
                raise RankError(f"{rank} has {problem}")

    def finish(self, room: Room, decode: str, prefill: str | None = None) -> None:
        """Wait until every rank has released the room, then forget it."""
        self.all(self.parties(decode, prefill), "wait_released", room, RELEASE_S)
        self.forget(room, decode, prefill)

    def forget(self, room: Room, decode: str, prefill: str | None = None) -> None:
        """Forget a room that has ended, and free its pages."""
        self.all(self.parties(decode, prefill), "forget", room)
        for name in (prefill or self.prefill.name, decode):
            self.allocators[name].free(room)

    def leftovers(self) -> dict[str, dict[str, int]]:
        """Return the tables that are not empty, by rank."""
        found = {}
        for rank in self.ranks:
            sizes = {key: size for key, size in rank.ask("tables").items() if size}
            if sizes:
                found[repr(rank)] = sizes
        return found

    # ------------------------------------------------------------ start and end

    def start_discovery(self) -> None:
        """Start a stopped discovery service again at the same address, with no registrations."""
        port = int(self.url.rpartition(":")[2])
        self.discovery = DiscoveryServer("127.0.0.1", port, self._key).start()

    def close(self) -> None:
        """End every process and the discovery service."""
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
    """Return the answer of each rank, or raise the first error among them."""
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
