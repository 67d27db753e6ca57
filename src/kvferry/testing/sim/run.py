"""Runs of worlds: a random seed, a named scenario, or a search for a seed that catches a break.

A run has faults, then calm, then new jobs (the probes) that must succeed, then a check that
nothing is left in any table.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kvferry.protocol.states import RoomState
from kvferry.testing.sim import pulls
from kvferry.testing.sim.breaks import BREAKS
from kvferry.testing.sim.cluster import (
    CONFIG,
    STRANGER,
    ClusterShape,
    Machines,
    SimCluster,
)
from kvferry.testing.sim.engines import EnginePolicy, SourceNode
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.nodes import Node
from kvferry.testing.sim.scenarios import SCENARIOS
from kvferry.testing.sim.wire import SLOW_WRITE_S
from kvferry.testing.sim.world import Faults, Violation

REAL = Machines()

CALM_AT = 2.5
# Processes that may still write quarantined memory are killed once, after the slowest write.
DOUBTS_S = SLOW_WRITE_S + 0.05
PROBES_AT = CALM_AT + 2.1
END_AT = PROBES_AT + 5.5
# A source that failed a room at its deadline refuses late offers for ``unclaimed_offer_ttl_s``.
AFTER_DEADLINE_S = CONFIG.unclaimed_offer_ttl_s + 0.5
# Part of the worlds in which instances pull.
PULLS = 0.35
# How long a source may keep a room after decode declined it: a handshake may have to come first.
DECLINED_S = 1.0


@dataclass
class SimResult:
    """Counts of what was run, and the violations found, each with its seed."""

    seeds: int = 0
    rooms: int = 0
    done: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: SimResult) -> None:
        """Add another result to this one."""
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
    """Run one random world.

    ``emphasis`` sets faults, and ``policy`` the transfer modes, that are drawn otherwise.
    """
    rng = random.Random(seed ^ 0x5EED)
    faults = replace(Faults.draw(rng), **(emphasis or {}))  # type: ignore[arg-type]
    shape = ClusterShape.draw(rng, faults)
    if policy is not None:
        shape = replace(shape, policy=policy)
    # A generator of its own, so that worlds without pulls stay as they were.
    pull_rng = random.Random(f"pulls {seed}")
    if pull_rng.random() < PULLS:
        shape = replace(
            shape,
            pulls=pull_rng.randint(1, 3),
            mutual=pull_rng.random() < 0.4,
            num_pages=shape.num_pages * pulls.MORE_PAGES,
            num_rows=shape.num_rows * pulls.MORE_PAGES,
        )
    cluster = SimCluster(seed, faults, shape, machines, CALM_AT)
    return _run(cluster, _disturb)


def run_scenario(name: str, seed: int = 0, machines: Machines = REAL) -> SimResult:
    """Run one named scenario."""
    scenario = SCENARIOS[name]
    cluster = SimCluster(seed, scenario.faults, scenario.shape, machines, CALM_AT)
    return _run(cluster, scenario.script, scenario.demand)


def hunt(name: str, seeds: range) -> tuple[int, str] | None:
    """Return how many seeds it takes to catch a broken rule, and the violation; or None."""
    broken = BREAKS[name]
    for count, seed in enumerate(seeds, start=1):
        result = run_seed(seed, broken.machines, broken.faults)
        if result.violations:
            return count, result.violations[0][1]
    return None


def _run(
    cluster: SimCluster,
    script: Callable[[SimCluster], None],
    demand: Callable[[SimCluster], None] = lambda _: None,
) -> SimResult:
    """Run a cluster to its end. ``demand`` checks it after the calm and before the probes."""
    result = SimResult(seeds=1)
    try:
        script(cluster)
        cluster.world.run(CALM_AT)
        _calm_down(cluster)
        cluster.world.run(PROBES_AT)
        demand(cluster)
        probes = [cluster.draw_job(deadline_s=5.0, probe=True) for _ in range(2)]
        for probe in probes:
            cluster.start(probe)
        declined = [cluster.decline_one()]
        if cluster.shape.pulls:
            probes.append(pulls.draw_pull(cluster, probe=True))
            cluster.start(probes[-1])
            declined.append(pulls.cancel_one(cluster))
        cluster.world.run(PROBES_AT + DECLINED_S)
        for job in declined:
            _check_declined(cluster, job)
        _run_to_the_end(cluster, probes)
        _check_end(cluster, probes)
    except Violation as violation:
        result.violations.append((cluster.world.seed, str(violation)))
    except Exception as error:  # An error of a machine is a finding and is reported with its seed.
        where = traceback.format_tb(error.__traceback__)[-1].strip()
        text = f"seed {cluster.world.seed}, t={cluster.world.now:.3f}: {error!r}\n{where}"
        result.violations.append((cluster.world.seed, text))
    result.rooms = len(cluster.jobs)
    result.done = sum(map(cluster.is_done, cluster.jobs))
    result.steps = cluster.world.steps
    result.faults = cluster.world.counts
    return result


# ---------------------------------------------------------------- faults


def _disturb(cluster: SimCluster) -> None:
    """Schedule a few jobs, and the faults that are counted rather than drawn per message."""
    world, rng = cluster.world, cluster.world.rng
    for _ in range(rng.randint(2, 4)):
        job = cluster.draw_job()
        world.at(rng.random() * 1.5, partial(cluster.start, job))
    for _ in range(cluster.shape.pulls):
        world.at(rng.random() * 1.5, partial(cluster.start, pulls.draw_pull(cluster)))
    if world.faults.strangers:
        world.counts["strangers"] += 1
        cluster.start(cluster.draw_job(decode=STRANGER))
    for kind in ("stalls", "kills", "leaves", "cuts", "foreign", "replays"):
        for _ in range(getattr(world.faults, kind)):
            world.at(rng.random() * CALM_AT * 0.9, partial(_inject, cluster, kind))


def _inject(cluster: SimCluster, kind: str) -> None:
    world, rng = cluster.world, cluster.world.rng
    node = rng.choice([node for node in cluster.nodes if node.process.alive] or cluster.nodes)
    world.counts[kind] += 1
    if kind == "stalls":
        world.record(node.peer, "!", "stopped")
        node.process.stall(rng.choice([0.2, 1.0, 3.0]))
    elif kind == "kills":
        cluster.kill(node, rng.choice([None, 0.05, 0.5]))
    elif kind == "leaves":
        world.record(node.peer, "!", "leaves")
        cluster.leave(node)
    elif kind == "foreign":
        noise = bytes(rng.randrange(256) for _ in range(rng.randint(0, 40)))
        world.arrive(node.peer, noise)
    elif kind == "replays" and world.past_frames:
        world.arrive(*rng.choice(world.past_frames))
    elif kind == "cuts":
        _cut(cluster)


def _cut(cluster: SimCluster) -> None:
    """Drop all frames between two peers for a while."""
    world, rng = cluster.world, cluster.world.rng
    if len(cluster.nodes) < 2:
        return
    pair = {node.peer for node in rng.sample(cluster.nodes, 2)}
    until = world.now + rng.choice([0.3, 2.5])
    before = world.intercept
    world.intercept = lambda sender, to, envelope: (
        []
        if {sender, to} == pair and world.now < until and not world.calm
        else before(sender, to, envelope)
        if before
        else None
    )


def _calm_down(cluster: SimCluster) -> None:
    """Continue the stopped processes and restart the dead ones."""
    cluster.world.intercept = None
    for node in cluster.nodes:
        node.process.wake()
        if not node.process.alive:
            cluster.boot(node.peer)
    cluster.world.at(DOUBTS_S, cluster.restart_doubted)


# ---------------------------------------------------------------- checks


def _run_to_the_end(cluster: SimCluster, probes: list[SimJob]) -> None:
    """Run until only heartbeats are left, or every deadline has passed.

    A deadline may lie beyond ``END_AT``: it counts from when the engine has pages for the job.
    """
    end_at = END_AT
    while cluster.world.now < end_at:
        cluster.world.run(cluster.world.now + 0.25)
        done = all(map(cluster.is_done, probes))
        if done and not any(_leftovers(node) for node in cluster.nodes):
            return
        deadlines = [due for node in cluster.nodes for due in node.due.values()]
        end_at = max([end_at, *(due + AFTER_DEADLINE_S for due in deadlines)])


def _leftovers(node: Node) -> list[str]:
    """Return the tables of a machine and an engine that are not empty."""
    names = [f"room {room!r}" for room in [*node.allocations, *node.due]]
    return names + [f"{key}: {value}" for key, value in node.checks.table_sizes().items() if value]


def _check_declined(cluster: SimCluster, job: SimJob) -> None:
    """Check that no source keeps a room that decode declined until its deadline.

    A source whose engine has not opened the room yet, for want of pages, may remember it.
    """
    for node in cluster.nodes:
        if not isinstance(node, SourceNode):
            continue
        room = node.machine.rooms.get(job.room)
        if room is not None and room.state is not RoomState.WARNED:
            text = f"{node.peer} keeps a room that decode declined ({room.state})"
            cluster.world.violate("never leaks", text, job.room)


def _check_end(cluster: SimCluster, probes: list[SimJob]) -> None:
    """Check that the probes are done, every room has ended and every table is empty."""
    world = cluster.world
    pulls.check_agreement(cluster)
    for job in probes:
        if not cluster.is_done(job):
            text = f"no progress after the faults stopped: {cluster.failures(job)}"
            world.violate("never hangs", text, job.room)
    for node in cluster.nodes:
        for job in cluster.jobs:
            if job.room in node.due:
                world.violate("never hangs", f"{node.peer} reported no outcome", job.room)
        if _leftovers(node):
            world.violate("never leaks", f"{node.peer} still has {_leftovers(node)}")
