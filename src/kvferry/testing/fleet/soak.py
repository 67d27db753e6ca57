"""A soak: thousands of rooms while ranks are killed, stopped and restarted, and rooms aborted.

It checks that every room ends at every living rank by its deadline, that the bytes of every room
that is done are right, that nobody writes released memory, and at the end that every table is empty
and that the ranks which were never killed have not grown.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.endpoint.config import EndpointConfig
from kvferry.ids import Room
from kvferry.layout.layout import Layout, Order, Parallel
from kvferry.layout.spec import (
    CacheSpec,
    DType,
    Group,
    Paged,
    StateRow,
    Tensor,
    Window,
    attention_group,
)
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Done, Outcome
from kvferry.testing.fleet.fleet import Fleet, FleetSide
from kvferry.testing.fleet.pools import Content
from kvferry.testing.fleet.process import RankProcess
from kvferry.testing.fleet.turns import News, RoomOrder, TurnWork

MAX_TOKENS = 120
DEADLINE_S = 4.0
# Extra time that a rank may need on a busy machine to end a room, and the time to release it.
GRACE_S = 10.0
RELEASE_S = 20.0
TURN_S = 0.004
PROTOCOL = ProtocolConfig(
    heartbeat_s=0.2,
    silence_s=1.5,
    handshake_s=3.0,
    resend_s=0.1,
    status_poll_s=0.3,
    unclaimed_offer_ttl_s=5.0,
)
SPEC = CacheSpec(
    num_layers=3,
    groups=(
        attention_group("full", Paged(), (0, 2), 6, 8, 6, DType.BFLOAT16),
        attention_group("near", Window(40), (1,), 6, 8, None, DType.BFLOAT16),
        Group("state", StateRow(), (1,), 6, (Tensor("s", DType.FLOAT32, 5),)),
    ),
)
PREFILL = "prefill"
# A rank's instance and number, the same after a restart.
Key = tuple[str, int]
# These are stopped but never killed, so that their growth can be measured.
SHELTERED: frozenset[Key] = frozenset({(PREFILL, 0), ("decode-a", 0)})


class SoakPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a soak, and its faults."""

    rooms: int = 10_000
    at_once: int = 24
    kills: int = 60
    stops: int = 60
    abort_share: float = 0.04
    transport: str = "shm"
    seed: int = 0
    limit_s: float = 1200.0
    # Limit for the growth of a sheltered rank after the first fifth of the rooms.
    growth_bytes: int = 16 << 20


class SoakReport(msgspec.Struct, kw_only=True):
    """The result of a soak."""

    rooms: int = 0
    transport: str = ""
    seconds: float = 0.0
    ends: dict[str, int] = {}
    done_everywhere: int = 0
    kills: int = 0
    stops: int = 0
    aborts: int = 0
    problems: list[str] = []
    leftovers: dict[str, dict[str, int]] = {}
    resources: dict[str, dict[str, list[int]]] = {}
    good: bool = False


@dataclass(eq=False)
class _OpenRoom:
    """A room that has not been released at every rank."""

    work: TurnWork
    decode: str
    # By when each rank must end it, and then release it.
    due: dict[Key, float] = field(default_factory=dict)
    unreleased: dict[Key, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)


class _PlannedOrder(NamedTuple):
    """An order for a later turn."""

    at: float
    key: Key
    order: RoomOrder


class Soak:
    """The runner of a soak: in each turn it sends orders to every running rank."""

    def __init__(self, plan: SoakPlan, tell: Callable[[int, str], None] = lambda *_: None) -> None:
        self._plan = plan
        self._tell = tell
        self._rng = random.Random(plan.seed)
        self._report = SoakReport(transport=plan.transport)
        self._ends: Counter[str] = Counter()
        self._open: dict[Room, _OpenRoom] = {}
        self._orders: dict[Key, list[RoomOrder]] = {}
        self._planned: list[_PlannedOrder] = []
        self._asleep: dict[Key, tuple[float, float]] = {}  # since when, until when
        self._dead: dict[Key, float] = {}  # until when
        self._faults = self._schedule()
        self._before: dict[Key, dict[str, int]] = {}

    def run(self) -> SoakReport:
        """Run the soak within its time limit."""
        began = time.monotonic()
        with _fleet(self._plan) as self._fleet:
            while self._continues(began):
                self._turn()
            self._calm_down()
            self._check_end()
        report = self._report
        report.seconds, report.ends = time.monotonic() - began, dict(self._ends)
        report.good = not (report.problems or report.leftovers)
        return report

    def _continues(self, began: float) -> bool:
        if time.monotonic() > began + self._plan.limit_s:
            self._problem(f"only {self._report.rooms} rooms in {self._plan.limit_s:g} s")
            return False
        return self._report.rooms < self._plan.rooms and len(self._report.problems) < 20

    def _problem(self, text: str) -> None:
        self._report.problems.append(text)

    # ------------------------------------------------------------ a turn

    def _turn(self) -> None:
        now = time.monotonic()
        self._wake(now)
        self._inject_faults(now)
        while len(self._open) < self._plan.at_once and self._begin_room():
            pass
        self._collect_due_orders(now)
        self._exchange()
        self._check_overdue()
        self._tell(self._report.rooms, self._summary())
        time.sleep(TURN_S)

    def _summary(self) -> str:
        ends = ", ".join(f"{code} {count}" for code, count in self._ends.most_common(4))
        return f"{len(self._open)} open; {self._report.kills} kills; {ends}"

    def _ranks(self) -> dict[Key, RankProcess]:
        return {(rank.spec.name, rank.spec.rank): rank for rank in self._fleet.ranks}

    def _exchange(self) -> None:
        """Send the due orders to every running rank, and handle its news."""
        down = self._asleep.keys() | self._dead.keys()
        awake = {key: rank for key, rank in self._ranks().items() if key not in down}
        for key, rank in awake.items():
            rank.begin("turn", self._orders.pop(key, []))
        for key, rank in awake.items():
            for news in rank.answer():
                self._take(key, news)

    def _take(self, key: Key, news: News) -> None:
        name = f"{news.room!r} at {key[0]}/{key[1]}"
        room = self._open.get(news.room)
        if news.problem:
            self._problem(f"{name}: {news.problem}")
        if room is None:
            self._problem(f"{name}: news of a room that has ended")
        elif news.outcome is not None:
            room.due.pop(key, None)
            room.unreleased[key] = time.monotonic() + RELEASE_S
            room.outcomes.append(news.outcome)
            self._ends["done" if isinstance(news.outcome, Done) else news.outcome.code] += 1
        elif not news.problem:
            room.unreleased.pop(key, None)
            self._drop_if_over(room)

    def _drop_if_over(self, room: _OpenRoom) -> None:
        if room.due or room.unreleased:
            return
        del self._open[room.work.room]
        self._report.done_everywhere += all(isinstance(o, Done) for o in room.outcomes)
        for side in (PREFILL, room.decode):
            self._fleet.allocators[side].free(room.work.room)

    def _check_overdue(self) -> None:
        """Report rooms that were not ended or released in time."""
        now = time.monotonic()
        for room in list(self._open.values()):
            for what, table in (("ended", room.due), ("released", room.unreleased)):
                late = [key for key, at in table.items() if now > at and key not in self._asleep]
                for key in late:
                    self._problem(f"{room.work.room!r} at {key[0]}/{key[1]} was not {what} in time")
                    del table[key]

    # ------------------------------------------------------------ rooms

    def _begin_room(self) -> bool:
        """Begin a room; return False if there is no memory, or no further room to begin."""
        rng, number = self._rng, self._report.rooms
        decode = rng.choice(list(self._fleet.decodes))
        tokens = rng.randint(1, MAX_TOKENS)
        sides = (PREFILL, decode)
        allocators = self._fleet.allocators
        if number >= self._plan.rooms or not all(allocators[s].has(tokens) for s in sides):
            return False
        name: Room = number if rng.random() < 0.5 else f"room-{number}"
        request = Request(tokens, rng.choice((0, 0, rng.randint(0, tokens))))
        one_sided = rng.random() < 0.005
        works = [
            TurnWork(
                name,
                Content(number, allocators[side].allocate(name, tokens), request),
                PREFILL,
                1.0 if one_sided else DEADLINE_S,
                rng.choice((16, 50, MAX_TOKENS)),
            )
            for side in sides
        ]
        self._report.rooms += 1
        self._open[name] = room = _OpenRoom(works[0], decode)
        # Sometimes one side never starts the room.
        missing = rng.choice(sides) if one_sided else None
        self._order_room(room, [(s, w) for s, w in zip(sides, works, strict=True) if s != missing])
        self._drop_if_over(room)
        return True

    def _order_room(self, room: _OpenRoom, parts: Iterable[tuple[str, TurnWork]]) -> None:
        rng, now = self._rng, time.monotonic()
        later = {side: now + rng.choice((0.0, rng.uniform(0, 0.1))) for side in self._fleet.sides}
        aborts = rng.random() < self._plan.abort_share
        self._report.aborts += aborts
        for side, work in parts:
            keys = [(side, rank) for rank in range(self._fleet.sides[side].layout.num_ranks)]
            for key in [key for key in keys if key not in self._dead]:
                verb = "begin" if side == PREFILL else "receive"
                self._planned.append(_PlannedOrder(later[side], key, RoomOrder(verb, work)))
                if side == PREFILL:
                    rest = later[side] + rng.choice((0.0, rng.uniform(0, 0.2)))
                    self._planned.append(_PlannedOrder(rest, key, RoomOrder("rest", work)))
                room.due[key] = now + DEADLINE_S + GRACE_S
            if aborts and rng.random() < 0.5:
                at = now + rng.uniform(0, 0.2)
                self._planned += [_PlannedOrder(at, key, RoomOrder("abort", work)) for key in keys]

    def _collect_due_orders(self, now: float) -> None:
        ready = sorted(one for one in self._planned if one.at <= now)
        self._planned = [one for one in self._planned if one.at > now]
        for _, key, order in ready:
            if key not in self._dead:
                self._orders.setdefault(key, []).append(order)

    # ------------------------------------------------------------ faults

    def _schedule(self) -> list[tuple[int, str]]:
        """Return the faults with the number of the room at which each happens, the last first."""
        plan, rng = self._plan, self._rng
        kinds = ["kill"] * plan.kills + ["stop"] * plan.stops
        first, last = plan.rooms // 20, plan.rooms * 19 // 20
        return sorted(((rng.randint(first, last), kind) for kind in kinds), reverse=True)

    def _inject_faults(self, now: float) -> None:
        rng = self._rng
        while self._faults and self._faults[-1][0] <= self._report.rooms:
            _, kind = self._faults.pop()
            well = self._ranks().keys() - self._asleep.keys() - self._dead.keys()
            victims = sorted(well - SHELTERED if kind == "kill" else well)
            if not victims:
                continue
            key = rng.choice(victims)
            if kind == "kill":
                self._kill(key, now)
            else:
                self._ranks()[key].stop()
                self._report.stops += 1
                self._asleep[key] = now, now + rng.choice((0.2, 1.0, rng.uniform(2, 4)))

    def _kill(self, key: Key, now: float) -> None:
        self._ranks()[key].kill()
        self._report.kills += 1
        self._dead[key] = now + self._rng.choice((0.0, self._rng.uniform(0, 1)))
        self._orders.pop(key, None)
        self._planned = [one for one in self._planned if one.key != key]
        for room in list(self._open.values()):
            room.due.pop(key, None)
            room.unreleased.pop(key, None)
            self._drop_if_over(room)

    def _wake(self, now: float) -> None:
        """Continue the ranks that were stopped for long enough, and restart the dead ones."""
        for key, (since, until) in list(self._asleep.items()):
            if now < until:
                continue
            del self._asleep[key]
            if key not in SHELTERED and self._rng.random() < 0.2:
                self._kill(key, now)
                continue
            self._ranks()[key].resume()
            for room in self._open.values():
                for table in (room.due, room.unreleased):
                    if key in table:
                        table[key] += now - since
        for key in [key for key, until in self._dead.items() if now >= until]:
            self._fleet.restart(self._ranks()[key])
            del self._dead[key]
        if not self._before and self._report.rooms >= self._plan.rooms // 5 and not self._asleep:
            self._before = self._measured()

    # ------------------------------------------------------------ the end

    def _calm_down(self) -> None:
        """Wait until every room has ended, without further faults and rooms."""
        self._faults = []
        give_up = time.monotonic() + DEADLINE_S + GRACE_S + RELEASE_S
        while (self._open or self._asleep or self._dead) and time.monotonic() < give_up:
            now = time.monotonic()
            self._wake(now)
            self._collect_due_orders(now)
            self._exchange()
            self._check_overdue()
            time.sleep(TURN_S)
        if self._open:
            self._problem(f"{len(self._open)} rooms never ended")

    def _check_end(self) -> None:
        """Check the tables, the seals and the growth of sheltered ranks."""
        give_up = time.monotonic() + PROTOCOL.unclaimed_offer_ttl_s + GRACE_S
        while self._fleet.leftovers() and time.monotonic() < give_up:
            time.sleep(0.1)
        self._report.leftovers = self._fleet.leftovers()
        for rank in self._fleet.ranks:
            broken = rank.ask("unsealed")
            if broken:
                self._problem(f"{rank}: {broken}")
        after = self._measured()
        for key, before in self._before.items():
            self._report.resources[f"{key[0]}/{key[1]}"] = {
                what: [before[what], after[key][what]] for what in before
            }
            grown = after[key]["memory_bytes"] - before["memory_bytes"]
            if grown > self._plan.growth_bytes:
                self._problem(f"{key[0]}/{key[1]} has grown by {grown} bytes")

    def _measured(self) -> dict[Key, dict[str, int]]:
        ranks = self._ranks()
        return {key: ranks[key].ask("resources") for key in SHELTERED}


def soak(plan: SoakPlan, tell: Callable[[int, str], None] = lambda *_: None) -> SoakReport:
    """Run a soak. ``tell`` is called with the number of rooms begun and a summary."""
    return Soak(plan, tell).run()


def _fleet(plan: SoakPlan) -> Fleet:
    """Return one prefill and two decode instances with other sizes, pages and orders."""
    config = EndpointConfig(protocol=PROTOCOL, lease_s=1.0, deadline_s=DEADLINE_S)

    def side(name: str, layout: Layout) -> FleetSide:
        pages = -(-MAX_TOKENS // layout.page_tokens) * plan.at_once
        return FleetSide(name, layout, pages, config, num_rows=2 * plan.at_once)

    return Fleet(
        side(PREFILL, Layout(SPEC, Parallel(tp=2), page_tokens=4)),
        side("decode-a", Layout(SPEC, Parallel(tp=1), page_tokens=8, order=Order.HND)),
        side("decode-b", Layout(SPEC, Parallel(tp=3), page_tokens=16)),
        transport=plan.transport,
        seed=plan.seed,
    )
