"""Playing worlds: one seed, many seeds, one scenario, or a hunt for a broken rule."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvferry.protocol.states import RoomState
from kvferry.testing.sim.breaks import BREAKS
from kvferry.testing.sim.cluster import (
    CONFIG,
    PREFILL,
    STRANGER,
    ClusterShape,
    Machines,
    SimCluster,
)
from kvferry.testing.sim.engines import EnginePolicy
from kvferry.testing.sim.faults import Faults
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.nodes import Node
from kvferry.testing.sim.scenarios import SCENARIOS
from kvferry.testing.sim.wire import SLOW_WRITE_S
from kvferry.testing.sim.world import Violation

REAL = Machines()

CALM_AT = 2.5
# The operator restarts doubted processes once, after the slowest write has been doubted.
DOUBTS_S = SLOW_WRITE_S + 0.05
PROBES_AT = CALM_AT + 2.1
END_AT = PROBES_AT + 5.5
# A source that failed a room at its deadline refuses late offers for it for
# ``unclaimed_offer_ttl_s``.
AFTER_DEADLINE_S = CONFIG.unclaimed_offer_ttl_s + 0.5
# How long a source may keep a room after decode gave it up: links may have to be made.
DECLINED_S = 1.0


@dataclass
class SimResult:
    """What was played, and what was found."""

    seeds: int = 0
    rooms: int = 0
    done: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: SimResult) -> None:
        """Take in another result."""
        self.seeds += other.seeds
        self.rooms += other.rooms
        self.done += other.done
        self.steps += other.steps
        self.faults += other.faults
        self.violations += other.violations


def run_seed(
    seed: int,
    machines: Machines = REAL,
    emphasis: dict[str, float] | None = None,
    policy: EnginePolicy | None = None,
) -> SimResult:
    """Play one seed: a time of faults, then calm, then rooms that must succeed.

    ``emphasis`` sets faults and ``policy`` the transfer modes that are otherwise drawn.
    """
    rng = random.Random(seed ^ 0x5EED)
    faults = replace(Faults.draw(rng), **(emphasis or {}))  # type: ignore[arg-type]
    shape = ClusterShape.draw(rng, faults)
    if policy is not None:
        shape = replace(shape, policy=policy)
    cluster = SimCluster(seed, faults, shape, machines, CALM_AT)
    return play(cluster, lambda: _disturb(cluster))


def play(
    cluster: SimCluster,
    disturb: Callable[[], None],
    demand: Callable[[SimCluster], None] | None = None,
) -> SimResult:
    """Play a cluster to its end and judge it."""
    result = SimResult(seeds=1)
    try:
        disturb()
        cluster.world.run(CALM_AT)
        _calm_down(cluster)
        cluster.world.run(PROBES_AT)
        if demand:
            demand(cluster)
        probes = [cluster.draw_job(deadline_s=5.0, probe=True) for _ in range(2)]
        for probe in probes:
            cluster.start(probe)
        declined = cluster.decline_one()
        cluster.world.run(PROBES_AT + DECLINED_S)
        _judge_declined(cluster, declined)
        _run_to_the_end(cluster, probes)
        _judge(cluster, probes)
    except Violation as violation:
        result.violations.append((cluster.world.seed, str(violation)))
    except Exception as error:  # whatever a machine raises is a finding, with its seed
        where = traceback.format_tb(error.__traceback__)[-1].strip()
        text = f"seed {cluster.world.seed}, t={cluster.world.now:.3f}: {error!r}\n{where}"
        result.violations.append((cluster.world.seed, text))
    result.rooms = len(cluster.jobs)
    result.done = sum(map(cluster.outcome_is_done, cluster.jobs))
    result.steps = cluster.world.steps
    result.faults = cluster.world.happened
    return result


def _disturb(cluster: SimCluster) -> None:
    """Start a few jobs, and hurt somebody now and then."""
    world, rng = cluster.world, cluster.world.rng
    for _ in range(rng.randint(2, 4)):
        job = cluster.draw_job()
        world.at(rng.random() * 1.5, lambda job=job: cluster.start(job))  # type: ignore[misc]
    if world.faults.strangers:
        world.happened["strangers"] += 1
        cluster.start(cluster.draw_job(decode=STRANGER))
    for kind in ("stalls", "kills", "leaves", "cuts", "foreign", "replays"):
        for _ in range(getattr(world.faults, kind)):
            world.at(rng.random() * CALM_AT * 0.9, lambda kind=kind: _strike(cluster, kind))  # type: ignore[misc]


def _strike(cluster: SimCluster, kind: str) -> None:
    world, rng = cluster.world, cluster.world.rng
    node = rng.choice([node for node in cluster.nodes if node.process.alive] or cluster.nodes)
    world.happened[kind] += 1
    if kind == "stalls":
        world.remember(node.peer, "!", "stopped")
        node.process.stall(rng.choice([0.2, 1.0, 3.0]))
    elif kind == "kills":
        cluster.kill(node, rng.choice([None, 0.05, 0.5]))
    elif kind == "leaves":
        world.remember(node.peer, "!", "leaves")
        cluster.leave(node)
    elif kind == "foreign":
        noise = bytes(rng.randrange(256) for _ in range(rng.randint(0, 40)))
        world.arrive(node.peer, noise)
    elif kind == "replays" and world.past_frames:
        world.arrive(*rng.choice(world.past_frames))
    elif kind == "cuts":
        _cut(cluster)


def _cut(cluster: SimCluster) -> None:
    """Two peers stop hearing each other for a while."""
    world, rng = cluster.world, cluster.world.rng
    one, two = rng.sample(cluster.nodes, 2) if len(cluster.nodes) > 1 else (None, None)
    if one is None or two is None:
        return
    until = world.now + rng.choice([0.3, 2.5])
    before = world.intercept
    pair = {one.peer, two.peer}
    world.intercept = lambda sender, to, envelope: (
        []
        if {sender, to} == pair and world.now < until and not world.calm
        else before(sender, to, envelope)
        if before
        else None
    )


def _calm_down(cluster: SimCluster) -> None:
    """Everyone who was stopped goes on, and everyone who died is there again."""
    cluster.world.intercept = None
    for node in cluster.nodes:
        node.process.wake()
        if not node.process.alive:
            cluster.boot(node.peer)
    cluster.world.at(DOUBTS_S, cluster.restart_doubted)


def _run_to_the_end(cluster: SimCluster, probes: list[SimJob]) -> None:
    """Play on until nothing is left to happen but heartbeats, or every deadline has passed.

    A deadline may lie beyond ``END_AT``: it counts from when the engine has pages for the job.
    """
    end_at = END_AT
    while cluster.world.now < end_at:
        cluster.world.run(cluster.world.now + 0.25)
        done = all(map(cluster.outcome_is_done, probes))
        if done and not any(_leftovers(node) for node in cluster.nodes):
            return
        deadlines = [due for node in cluster.nodes for due in node.due.values()]
        end_at = max([end_at, *(due + AFTER_DEADLINE_S for due in deadlines)])


def _leftovers(node: Node) -> list[str]:
    """Return the tables of a machine and an engine that are not empty at the end."""
    names = [f"room {room!r}" for room in [*node.allocations, *node.due]]
    return names + [f"{key}: {value}" for key, value in node.tables().items() if value]


def _judge_declined(cluster: SimCluster, job: SimJob) -> None:
    """A room that decode has given up is over at every source, long before its deadline.

    A source whose engine has no pages for the job yet, and so has not opened it, may remember it.
    """
    for node in cluster.nodes:
        if node.peer.instance != PREFILL:
            continue
        room = node.machine.rooms.get(job.room)
        if room is not None and room.state is not RoomState.WARNED:
            text = f"{node.peer} keeps a room that decode gave up ({room.state})"
            cluster.world.violate("never leaks", text, job.room)


def _judge(cluster: SimCluster, probes: list[SimJob]) -> None:
    """What must hold when everything is over."""
    world = cluster.world
    for job in probes:
        if not cluster.outcome_is_done(job):
            text = f"no progress after the faults stopped: {cluster.failures(job)}"
            world.violate("never hangs", text, job.room)
    for node in cluster.nodes:
        for job in cluster.jobs:
            if job.room in node.due:
                world.violate("never hangs", f"{node.peer} never heard the end", job.room)
        if _leftovers(node):
            world.violate("never leaks", f"{node.peer} still has {_leftovers(node)}")


def run_seeds(seeds: range, machines: Machines = REAL) -> Iterator[SimResult]:
    """Play many seeds, one result at a time."""
    return (run_seed(seed, machines) for seed in seeds)


def run_scenario(name: str, seed: int = 0, machines: Machines = REAL) -> SimResult:
    """Play one named situation."""
    scenario = SCENARIOS[name]
    cluster = SimCluster(seed, scenario.faults, scenario.shape, machines, CALM_AT)
    return play(cluster, lambda: scenario.script(cluster), scenario.demand)


def hunt(name: str, seeds: range) -> tuple[int, str] | None:
    """Play seeds and scenarios with a broken rule until it is noticed: after how many?"""
    broken = BREAKS[name]
    for count, seed in enumerate(seeds, start=1):
        result = run_seed(seed, broken.machines, broken.faults)
        if result.violations:
            return count, result.violations[0][1]
    return None
