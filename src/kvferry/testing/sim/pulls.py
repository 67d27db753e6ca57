"""Pulls of a simulated world: what the engine of a holder has, and its answers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvferry.layout.intervals import Span
from kvferry.plan.plan import Request
from kvferry.prefix import SPAN_TOKENS, PrefixChain, prefix_chain
from kvferry.protocol.events import Cancel, Held, LookUp
from kvferry.protocol.outcome import Done
from kvferry.testing.sim.jobs import SimHolding, SimJob, SimPush

if TYPE_CHECKING:
    from kvferry.testing.sim.cluster import SimCluster
    from kvferry.testing.sim.engines import SourceNode

# Pages that a world with pulls has for each page of another: a chain counts whole spans.
MORE_PAGES = 10
# A holder with this number more than the job's holds another sequence and calls it the job's.
ANOTHER = 1000


def sequence_chain(number: int, tokens: int) -> PrefixChain:
    """Return the chain of a job's token sequence."""
    return prefix_chain(range(100 * number, 100 * number + tokens), model="sim", dtype="u8")


def draw_pull(
    cluster: SimCluster, sides: tuple[str, str] | None = None, *, probe: bool = False
) -> SimJob:
    """Draw a pull and what its holder will find: all, a part, nothing or another sequence.

    ``sides``: the holder and the instance that asks. A probe finds less than it asks for.
    """
    number = len(cluster.jobs)
    rng = random.Random(f"pull {cluster.world.seed} {number}")
    asked = 2 * SPAN_TOKENS if probe else SPAN_TOKENS * rng.choice([1, 2])
    held = SPAN_TOKENS if probe else rng.choice([0, SPAN_TOKENS, asked, asked])
    prefix = 0 if probe else rng.choice([0, 0, rng.randint(0, asked)])
    lies = not probe and rng.random() < 0.15
    holder, decode = sides or rng.choice(cluster.pull_sides)
    job = SimJob(
        room=number if number % 2 else f"pull-{number}",
        number=number,
        request=Request(asked, prefix),
        pushes=(),
        prefill=holder,
        decode=decode,
        deadline_s=5.0 if probe else 0.5 + rng.random() * 2,
        metadata=f"pulled {number}".encode(),
        probe=probe,
        chain=sequence_chain(number, asked),
        held=SimHolding(number + ANOTHER * lies, held),
    )
    cluster.jobs.append(job)
    return job


def start_pull(cluster: SimCluster, job: SimJob) -> None:
    """Start a pull at every rank of the instance that asks."""
    ranks = [node for node in cluster.nodes if node.peer.instance == job.decode]
    if cluster.world.inject("one_sided"):
        del ranks[0]
    for node in ranks:
        cluster.world.at(cluster.world.rng.random() * 0.02, partial(node.start, job))


def cancel_one(cluster: SimCluster) -> SimJob:
    """Start a pull that its engine cancels, before or after the answer."""
    job = draw_pull(cluster, probe=True)
    start_pull(cluster, job)
    after_s = 0.02 + cluster.world.rng.random() * 0.05
    for node in cluster.nodes:
        if node.peer.instance == job.decode:
            cluster.world.at(after_s, partial(node.deliver, Cancel(job.room)))
    return job


def look_up(cluster: SimCluster, lead: SourceNode, action: LookUp) -> None:
    """Answer the lead of a holder, after a while."""
    world = cluster.world
    delay = world.rng.random() * 0.03
    if world.inject("slow_prefill"):
        delay += world.rng.random() * 2.0
    (job,) = (job for job in cluster.jobs if job.room == action.room)
    if job.chain is None or action.chain != job.chain.short:
        world.violate("never corrupts", f"{lead.peer} is asked for another chain", action.room)
    world.at(delay, partial(_hold, cluster, lead, job, action.deadline))


def _hold(cluster: SimCluster, lead: SourceNode, job: SimJob, deadline: float) -> None:
    """Pin what the holder finds at each of its ranks, and answer."""
    world, held = cluster.world, job.held.tokens
    ranks = [node for node in cluster.sources if node.peer.instance == lead.peer.instance]
    if any(job.room in node.pinned for node in ranks):
        held = 0
    pinned = replace(
        job,
        number=job.held.number,
        request=Request(held),
        pushes=(SimPush(Span(0, held)),),
        chain=sequence_chain(job.held.number, held),
        deadline_s=deadline - world.now,
    )
    # A holder has the pages already. Here they come from the pool, which may have too few.
    pages = [node.memory.allocate(pinned.number, pinned.request) for node in ranks]
    for node, allocation in zip(ranks, pages, strict=True):
        if allocation is not None and (None in pages or not held):
            node.memory.release(allocation)
        elif allocation is not None:
            node.pinned.add(job.room)
            world.at(world.rng.random() * 0.02, partial(node.pin, pinned, allocation))
    # An engine may answer when nobody waits any more; the source can act only from then on.
    lead.looked_up[job.room] = world.now
    lead.deliver(Held(job.room, 0 if None in pages else held))


def check_agreement(cluster: SimCluster) -> None:
    """Check that no two ranks were given different lengths of one pull."""
    for job in cluster.jobs:
        if job.chain is None:
            continue
        ends = [node.outcomes.get(job.room) for node in cluster.nodes]
        lengths = {end.pulled for end in ends if isinstance(end, Done) and end.pulled is not None}
        if len(lengths) > 1:
            cluster.world.violate("never corrupts", f"ranks pulled {sorted(lengths)}", job.room)
        if job.probe and lengths - {job.held.tokens}:
            cluster.world.violate("never hangs", f"a probe pulled {sorted(lengths)}", job.room)
