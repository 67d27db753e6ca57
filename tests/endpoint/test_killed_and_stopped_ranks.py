"""Ranks that are killed or stopped at every state of a room, with real processes and signals.

Each test brings a room to a state, kills or stops one rank, and checks the others: the room ends in
time and with the right reason, an unrelated room goes on, memory is released with proof and not
before, and rooms work again once the rank is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import pytest
from endpoint.fleets import HEADS, ON_GPU, QUICK, STAGED, Way, eventually, layout
from msgspec.structs import replace

from kvferry.discovery.client import DiscoveryClient
from kvferry.endpoint.config import EndpointConfig
from kvferry.layout.spec import attention
from kvferry.plan.plan import Request
from kvferry.protocol.outcome import Done, Failure, FailureCode, Status
from kvferry.testing.fleet import Fleet, FleetSide, RankError, RankProcess

REQUEST = Request(60, prefix=5)
FIRST = (0, 20)
REST = (20, 60)
# Longer than anything here may take, so that no room may end by its deadline.
DEADLINE_S = 30.0
# From a death to its consequences: hint, probe, grace period, and a busy machine.
NOTICED_S = 5.0
# How long a test watches memory that must not be released.
WATCHED_S = 0.7


class Stage(StrEnum):
    """State of the room when a rank is killed or stopped."""

    UNMET = "unmet"  # the two have no link
    EARLY = "early"  # offered, not opened by the source's engine
    OPEN = "open"  # opened, and nothing pushed
    MOVING = "moving"  # a part has arrived
    CLOSED = "closed"  # all is written; the target has not sent Complete


class Signal(StrEnum):
    KILL = "kill"
    STOP = "stop"


WAYS = [Way("shm", EndpointConfig()), Way("nixl", STAGED), Way("mooncake", EndpointConfig())]
SHM = WAYS[0]
STAGES = [
    *((SHM, stage) for stage in Stage),
    *((way, Stage.MOVING) for way in WAYS[1:]),
]
MAPPED_GPU, STAGED_GPU, _ = ON_GPU
GPU_STAGES = [*((MAPPED_GPU, stage) for stage in Stage), (STAGED_GPU, Stage.MOVING)]


def on_gpu(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


# If a process is killed, only the proof of its death may end a room, not its silence.
TIMES = {Signal.KILL: replace(QUICK, silence_s=60.0), Signal.STOP: QUICK}


def side(name: str, way: Way, tp: int, page: int, signal: Signal) -> FleetSide:
    config = replace(way.config, protocol=TIMES[signal], lease_s=1.0)
    return FleetSide(name, layout(HEADS, page, tp=tp), 64, config)


def send_signal(rank: RankProcess, signal: Signal) -> None:
    if signal is Signal.KILL:
        rank.kill()
    else:
        rank.stop()


def expected(stage: Stage, signal: Signal) -> FailureCode:
    if stage is Stage.UNMET:
        return FailureCode.UNREACHABLE
    return FailureCode.PEER_GONE if signal is Signal.KILL else FailureCode.PEER_SILENT


def bring_to(fleet: Fleet, stage: Stage, room: str, *, closing: list[RankProcess]) -> None:
    """Bring a room whose pages are filled to a state."""
    sources, targets = fleet.sources, fleet.targets["decode"]
    everyone = list(range(len(targets)))
    fleet.receive(room, "decode", REQUEST, DEADLINE_S)
    eventually(lambda: fleet.all(sources, "offered_by", room) == [everyone] * len(sources))
    if stage is Stage.EARLY:
        return
    fleet.all(sources, "open", room, DEADLINE_S)
    if stage is Stage.OPEN:
        return
    fleet.all(sources, "push", room, FIRST)
    eventually(lambda: fleet.all(targets, "lacks", room) == [{REST}] * len(targets))
    if stage is Stage.CLOSED:
        finish(fleet, closing, room)


def finish(fleet: Fleet, ranks: list[RankProcess], room: str) -> None:
    fleet.all(ranks, "push", room, REST)
    fleet.all(ranks, "finish", room, b"first token", REQUEST.num_tokens)


def failure(rank: RankProcess, room: str) -> FailureCode:
    outcome = rank.ask("outcome", room, DEADLINE_S + 2)
    assert isinstance(outcome, Failure), f"{rank} ended {room!r} with {outcome}"
    return outcome.code


def begin_other(fleet: Fleet, decode: str, prefill: str) -> None:
    """Start a room between two ranks that are neither killed nor stopped."""
    fleet.fill("other", 7, REQUEST.num_tokens, prefill)
    fleet.receive("other", decode, REQUEST, prefill=prefill)
    fleet.all(fleet.members[prefill], "open", "other", DEADLINE_S)
    fleet.all(fleet.members[prefill], "push", "other", FIRST)


def finish_other(fleet: Fleet, decode: str, prefill: str) -> None:
    finish(fleet, fleet.members[prefill], "other")
    fleet.demand_done("other", fleet.parties(decode, prefill), DEADLINE_S)
    problems = fleet.all(fleet.targets[decode], "room_problem", "other", 7, REQUEST)
    assert not any(problems), problems
    fleet.finish("other", decode, prefill)


def demand_held(rank: RankProcess, room: str) -> None:
    with pytest.raises(RankError, match="TimeoutError"):
        rank.ask("wait_released", room, WATCHED_S)


# ---------------------------------------------------------------- a source


def source_fleet(way: Way, signal: Signal = Signal.STOP) -> Fleet:
    return Fleet(
        side("prefill", way, 2, 4, signal),
        side("decode", way, 1, 8, signal),
        spares=[side("spare", way, 1, 4, signal)],
        transport=way.transport,
        device=way.device,
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize(("way", "stage"), [*STAGES, *on_gpu(GPU_STAGES)], ids=str)
def test_a_source_is_lost(way: Way, stage: Stage, signal: Signal) -> None:
    with source_fleet(way, signal) as fleet:
        victim, sibling = fleet.sources
        (target,) = fleet.targets["decode"]
        fleet.fill("room", 1, REQUEST.num_tokens)
        begin_other(fleet, "decode", "spare")
        if stage is Stage.UNMET:
            send_signal(victim, signal)
            fleet.receive("room", "decode", REQUEST, DEADLINE_S)
        else:
            bring_to(fleet, stage, "room", closing=[victim])
            if stage is Stage.CLOSED:
                eventually(lambda: target.ask("closed_sources", "room") == [0])
            send_signal(victim, signal)
        if stage is Stage.CLOSED:
            # The victim has sent everything, so the room completes.
            finish(fleet, [sibling], "room")
            fleet.demand_done("room", [target, sibling], DEADLINE_S)
            assert target.ask("room_problem", "room", 1, REQUEST) is None
            if signal is Signal.KILL:
                eventually(lambda: "prefill/0" not in target.ask("peers"), NOTICED_S)
        else:
            assert failure(target, "room") is expected(stage, signal)
            _demand_known_at_sibling(sibling, stage, signal)
        finish_other(fleet, "decode", "spare")
        _demand_release(fleet, victim, target, stage, signal)
        sibling.ask("wait_released", "room", NOTICED_S)
        _recover(fleet, victim, "room", signal)


def _demand_known_at_sibling(sibling: RankProcess, stage: Stage, signal: Signal) -> None:
    """The target tells the live source, even if its engine opens the room later."""
    if stage in (Stage.UNMET, Stage.EARLY):
        sibling.ask("open", "room", 2.0)
    if stage is Stage.UNMET:
        # The offer may have expired before the engine opened the room.
        assert failure(sibling, "room") in (FailureCode.UNREACHABLE, FailureCode.DEADLINE)
    else:
        assert failure(sibling, "room") is expected(stage, signal)


def _demand_release(
    fleet: Fleet, victim: RankProcess, target: RankProcess, stage: Stage, signal: Signal
) -> None:
    """Pages that a stopped source may write stay held until it resumes or is dead."""
    if signal is Signal.STOP and stage in (Stage.EARLY, Stage.OPEN, Stage.MOVING):
        demand_held(target, "room")
        if stage is Stage.OPEN:
            victim.kill()
        else:
            victim.resume()
    target.ask("wait_released", "room", NOTICED_S)


def _recover(fleet: Fleet, victim: RankProcess, room: str, signal: Signal) -> None:
    """Bring the rank back under its name, and check that a room succeeds."""
    if not victim.process.is_alive():
        victim = fleet.restart(victim)
    elif signal is Signal.STOP:
        victim.resume()
        if room in victim.ask("rooms"):
            victim.ask("outcome", room, DEADLINE_S)
            victim.ask("wait_released", room, NOTICED_S)
        if victim.spec.role == "target":
            # Its next heartbeat tells it that its session is over.
            eventually(lambda: "prefill/0" not in victim.ask("peers"), NOTICED_S)
    fleet.forget(room, "decode")
    fleet.carry("good", Request(50, prefix=3), seed=9)
    assert fleet.leftovers() == {}


# ---------------------------------------------------------------- a target


def target_fleet(way: Way, signal: Signal) -> Fleet:
    return Fleet(
        side("prefill", way, 1, 4, signal),
        side("decode", way, 2, 8, signal),
        side("decode-2", way, 1, 16, signal),
        transport=way.transport,
        device=way.device,
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize(
    ("way", "stage"),
    [
        *[case for case in STAGES if case[1] is not Stage.UNMET],
        *on_gpu([case for case in GPU_STAGES if case[1] is not Stage.UNMET]),
    ],
    ids=str,
)
def test_a_target_is_lost(way: Way, stage: Stage, signal: Signal) -> None:
    with target_fleet(way, signal) as fleet:
        (source,) = fleet.sources
        victim, sibling = fleet.targets["decode"]
        fleet.fill("room", 1, REQUEST.num_tokens)
        begin_other(fleet, "decode-2", "prefill")
        bring_to(fleet, Stage.MOVING if stage is Stage.CLOSED else stage, "room", closing=[])
        send_signal(victim, signal)
        if stage is Stage.CLOSED:
            finish(fleet, [source], "room")
        if stage is Stage.EARLY:
            eventually(lambda: "decode/0" not in source.ask("peers"))
            source.ask("open", "room", DEADLINE_S)
        assert failure(source, "room") is expected(stage, signal)
        if stage is Stage.CLOSED:
            # Its own part is complete, so either outcome is right.
            outcome = sibling.ask("outcome", "room", DEADLINE_S)
            assert isinstance(outcome, Done) or outcome.code is expected(stage, signal)
        else:
            assert failure(sibling, "room") is expected(stage, signal)
        finish_other(fleet, "decode-2", "prefill")
        if signal is Signal.STOP and not way.maps_peer:
            # A network may still read pages whose bytes go to a stopped process.
            victim.resume()
        source.ask("wait_released", "room", NOTICED_S)
        sibling.ask("wait_released", "room", NOTICED_S)
        _recover(fleet, victim, "room", signal)


# ---------------------------------------------------------------- in the middle of staging

LONG = Request(1500)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("victim_is", ["source", "target"])
@pytest.mark.parametrize(
    ("way", "ahead"),
    [
        *((Way("nixl", STAGED), 0), (Way("nixl", STAGED), 1), (Way("mooncake", STAGED), 0)),
        *on_gpu([(STAGED_GPU, 2)]),
    ],
    ids=str,
)
def test_a_rank_is_lost_while_slots_are_gathered_written_and_scattered(
    way: Way, ahead: int, victim_is: str, signal: Signal
) -> None:
    config = replace(
        way.config, protocol=replace(TIMES[signal], early_gather_slots=ahead), lease_s=1.0
    )
    sides = [FleetSide(name, layout(HEADS, 8), 400, config) for name in ("prefill", "decode")]
    with Fleet(*sides, transport=way.transport, device=way.device) as fleet:
        (source,), (target,) = fleet.sources, fleet.targets["decode"]
        victim, other = (source, target) if victim_is == "source" else (target, source)
        fleet.fill("room", 1, LONG.num_tokens)
        fleet.receive("room", "decode", LONG, DEADLINE_S)
        source.ask("open", "room", DEADLINE_S)
        source.ask("push", "room", (0, 500))
        eventually(lambda: bool(target.ask("status", "room") == Status.MOVING))
        source.ask("push", "room", (500, LONG.num_tokens))
        # The room is not finished, so it can't be complete however late this signal is sent.
        send_signal(victim, signal)
        # The reason depends on what is noticed first: the dead process, or a failed write to it.
        assert failure(other, "room") in (expected(Stage.MOVING, signal), FailureCode.TRANSPORT)
        if signal is Signal.STOP:
            if victim is source:
                demand_held(target, "room")
            victim.resume()
            victim.ask("outcome", "room", DEADLINE_S)
            victim.ask("wait_released", "room", NOTICED_S)
        other.ask("wait_released", "room", NOTICED_S)
        _recover(fleet, victim, "room", signal)


# 2.1 GB: a GPU takes milliseconds for it.
HUGE, HUGE_PAGE = Request(32768), 64
HUGE_HEADS = attention(layers=16, kv_heads=8, head_dim=128)
# Much longer than a GPU takes for all of it.
SETTLED_S = 1.0


@pytest.mark.gpu
@pytest.mark.timeout(90)
@pytest.mark.parametrize("way", [MAPPED_GPU, STAGED_GPU._replace(config=EndpointConfig())], ids=str)
@pytest.mark.parametrize("lives_ms", [1, 2, 4])
def test_the_gpu_of_a_dead_source_writes_nothing_into_released_memory(
    way: Way, lives_ms: int
) -> None:
    config = replace(way.config, protocol=TIMES[Signal.KILL], lease_s=1.0)
    pages = HUGE.num_tokens // HUGE_PAGE
    sides = [
        FleetSide(name, layout(HUGE_HEADS, HUGE_PAGE), pages, config)
        for name in ("prefill", "decode")
    ]
    with Fleet(*sides, transport=way.transport, device=way.device) as fleet:
        (source,), (target,) = fleet.sources, fleet.targets["decode"]
        fleet.fill("room", 1, HUGE.num_tokens)
        fleet.receive("room", "decode", HUGE, DEADLINE_S)
        eventually(lambda: source.ask("offered_by", "room") == [0])
        source.ask("open", "room", DEADLINE_S)
        source.begin("push_all", "room", HUGE.num_tokens, 4096, b"")
        time.sleep(lives_ms / 1000)
        # Do not wait for the process to end: its work on the GPU would have ended too.
        source.process.kill()
        outcome = target.ask("outcome", "room", DEADLINE_S)
        assert way.maps_peer or isinstance(outcome, Failure), "the transfer takes longer than that"
        target.ask("wait_released", "room", NOTICED_S)
        # From here on, the memory may belong to another room.
        target.ask("clear")
        time.sleep(SETTLED_S)
        assert target.ask("problem_among", []) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim_is", ["source", "target"])
def test_a_short_stop_is_no_death(victim_is: str) -> None:
    with source_fleet(SHM) as fleet:
        victim = fleet.sources[0] if victim_is == "source" else fleet.targets["decode"][0]
        fleet.fill("room", 1, REQUEST.num_tokens)
        bring_to(fleet, Stage.MOVING, "room", closing=[])
        victim.stop()
        time.sleep(QUICK.silence_s / 3)
        victim.resume()
        finish(fleet, fleet.sources, "room")
        fleet.demand_done("room", fleet.parties("decode"), DEADLINE_S)
        fleet.demand_right("decode", [("room", 1, REQUEST)])
        fleet.finish("room", "decode")
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
def test_a_failed_room_says_which_pages_are_bad() -> None:
    with source_fleet(SHM) as fleet:
        (target,) = fleet.targets["decode"]
        fleet.fill("room", 1, REQUEST.num_tokens)
        bring_to(fleet, Stage.MOVING, "room", closing=[])
        where = target.ask("pages_of", "room")
        fleet.sources[1].kill()
        assert failure(target, "room") is FailureCode.PEER_GONE
        # Tokens from 20 on are missing: from the middle of the third of eight pages.
        assert target.ask("bad_pages", "room") == {"kv": list(where.pages[2:])}


# ---------------------------------------------------------------- the discovery service


@pytest.mark.timeout(60)
def test_an_outage_of_the_discovery_service() -> None:
    with source_fleet(SHM) as fleet:
        (target,) = fleet.targets["decode"]
        fleet.carry("before", REQUEST, seed=1)
        fleet.fill("during", 2, REQUEST.num_tokens)
        bring_to(fleet, Stage.MOVING, "during", closing=[])
        fleet.discovery.stop()
        # Linked peers do not need it.
        finish(fleet, fleet.sources, "during")
        fleet.demand_done("during", fleet.parties("decode"), DEADLINE_S)
        fleet.finish("during", "decode")
        fleet.carry("without", REQUEST, seed=3)
        # Others wait for it, until their deadline.
        fleet.receive("too-short", "decode", REQUEST, 0.5, prefill="spare")
        assert failure(target, "too-short") is FailureCode.UNREACHABLE
        fleet.fill("waits", 4, REQUEST.num_tokens, "spare")
        fleet.receive("waits", "decode", REQUEST, prefill="spare")
        fleet.send("waits", REQUEST.num_tokens, prefill="spare")
        assert target.ask("status", "waits") == Status.CONNECTING
        fleet.start_discovery()
        fleet.demand_done("waits", fleet.parties("decode", "spare"), 30.0)
        assert target.ask("room_problem", "waits", 4, REQUEST) is None
        fleet.finish("waits", "decode", "spare")
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
def test_a_prefill_instance_may_start_after_a_room_needs_it() -> None:
    ended = threading.Event()
    with source_fleet(SHM) as fleet, DiscoveryClient(fleet.url) as client:
        client.watch("spare", lambda view: None if view else ended.set())
        client.resolve("spare", 10.0)
        (spare,) = fleet.members["spare"]
        spare.kill()
        assert ended.wait(10.0)
        fleet.receive("room", "decode", REQUEST, prefill="spare")
        fleet.restart(spare)
        fleet.fill("room", 1, REQUEST.num_tokens, "spare")
        fleet.send("room", REQUEST.num_tokens, prefill="spare")
        fleet.demand_done("room", fleet.parties("decode", "spare"), 30.0)
        fleet.demand_right("decode", [("room", 1, REQUEST)])
        fleet.finish("room", "decode", "spare")
        assert fleet.leftovers() == {}


@pytest.mark.timeout(60)
def test_nothing_is_kept_of_a_dead_instance() -> None:
    with source_fleet(SHM) as fleet:
        (target,) = fleet.targets["decode"]
        fleet.carry("room", REQUEST, seed=1, prefill="spare")
        fleet.carry("other", REQUEST, seed=2)
        assert target.ask("instances") == {"prefill", "spare"}
        (spare,) = fleet.members["spare"]
        spare.kill()
        eventually(lambda: target.ask("instances") == {"prefill"})
        # It comes back.
        fleet.restart(spare)
        fleet.carry("again", REQUEST, seed=3, prefill="spare")
        # Nothing is kept of an instance that never existed.
        fleet.receive("nobody", "decode", REQUEST, 0.3, prefill="nobody")
        assert failure(target, "nobody") is FailureCode.UNREACHABLE
        eventually(lambda: target.ask("instances") == {"prefill", "spare"})
        assert fleet.leftovers() == {}
