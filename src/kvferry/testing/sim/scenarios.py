"""Named situations that other systems have failed in.

The letters are those of our list of known failures: C for completion, S for
staging, L for lifetime, P for peers. Each scenario says what is done to the
cluster and what must come of it, beyond the promises, which always hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from kvferry.ids import Peer
from kvferry.layout import Parallel
from kvferry.protocol.events import Discard, Gather, Post
from kvferry.protocol.messages import (
    Accept,
    Arrived,
    Close,
    Complete,
    Grant,
    Hello,
    Offer,
    Staging,
    Want,
    Welcome,
)
from kvferry.protocol.outcome import Failure, FailureCode
from kvferry.testing.sim.cluster import HYBRID, PREFILL, STRANGER, ClusterShape, SimCluster
from kvferry.testing.sim.engines import EnginePolicy, SourceNode
from kvferry.testing.sim.faults import Faults
from kvferry.testing.sim.jobs import SimJob
from kvferry.testing.sim.scripts import (
    Script,
    ask_again,
    at,
    both,
    cancel,
    hostile_frames,
    huge_page,
    jobs,
    kill,
    kill_after_a_layer,
    layers,
    lose_first,
    other_version,
    shuffle_notes,
    slow_gathers,
    slow_writes,
    stall,
)

Demand = Callable[[SimCluster], None]


@dataclass(frozen=True)
class Scenario:
    """A situation, what happens in it, and what must come of it."""

    title: str
    script: Script
    demand: Demand
    shape: ClusterShape = field(default_factory=ClusterShape)
    faults: Faults = field(default_factory=Faults)


# ---------------------------------------------------------------- demands


def all_done(cluster: SimCluster) -> None:
    """Every job is done, on every rank."""
    for job in cluster.jobs:
        if not cluster.outcome_is_done(job):
            cluster.world.violate("never hangs", f"{cluster.failures(job)}", job.room)


def done(index: int) -> Demand:
    """That job is done."""

    def demand(cluster: SimCluster) -> None:
        job = cluster.jobs[index]
        if not cluster.outcome_is_done(job):
            cluster.world.violate("never hangs", f"{cluster.failures(job)}", job.room)

    return demand


def promises_only(cluster: SimCluster) -> None:
    """Nothing beyond the promises."""


def staged_something(cluster: SimCluster) -> None:
    """Every job is done, and slots were used for it."""
    all_done(cluster)
    writes = [
        x for _, _, _, x in cluster.world.history if getattr(x, "local_slot", None) is not None
    ]
    if not writes:
        cluster.world.violate("never hangs", "nothing was staged")


def gathered_ahead(cluster: SimCluster) -> None:
    """Slots were filled before their credits came; some were posted, and some let go."""
    seen = {type(thing) for _, _, _, thing in cluster.world.history}
    if not seen.issuperset({Gather, Post, Discard}):
        cluster.world.violate("never hangs", f"nothing was gathered ahead: {seen}")


def failed_with(instance: str, index: int, *codes: FailureCode) -> Demand:
    """That job failed at every rank of the instance, for one of those reasons, in good time."""

    def demand(cluster: SimCluster) -> None:
        job = cluster.jobs[index]
        for node in cluster.nodes:
            outcome = node.outcomes.get(job.room)
            if node.peer.instance != instance:
                continue
            if not isinstance(outcome, Failure) or outcome.code not in codes:
                cluster.world.violate("says no early", f"{node.peer}: {outcome}", job.room)

    return demand


def malformed_were_refused(cluster: SimCluster) -> None:
    """The malformed frames were seen as such, and counted."""
    if not cluster.world.happened["refused-malformed"]:
        cluster.world.violate("lets nobody in", "a negative index was not refused")


def nobody_was_lost(cluster: SimCluster) -> None:
    """Every job is done and no peer was taken for dead."""
    all_done(cluster)
    if any("Disconnect" in type(x).__name__ for _, _, _, x in cluster.world.history):
        cluster.world.violate("never hangs", "back-pressure was taken for death")


def tables_do_not_grow(cluster: SimCluster) -> None:
    """After many rooms, what a machine keeps is what it kept after one."""
    all_done(cluster)
    for node in cluster.nodes:
        links = len(node.machine.links)
        if links > len(cluster.nodes):
            cluster.world.violate("never leaks", f"{node.peer} has {links} links")


def quarantine_was_used(cluster: SimCluster) -> None:
    """Pages waited for a stopped writer instead of being reused."""
    waited = [
        release - report
        for job in cluster.jobs[:1]
        for report, release in _report_and_release(cluster, job)
    ]
    if not waited or max(waited) < 0.5:
        cluster.world.violate("never reuses", f"pages were released after {waited}")


def _report_and_release(cluster: SimCluster, job: SimJob) -> list[tuple[float, float]]:
    times: dict[Peer, list[float]] = {}
    for t, who, _, thing in cluster.world.history:
        if type(thing).__name__ in ("Report", "Release") and thing.room == job.room:  # type: ignore[attr-defined]
            times.setdefault(who, []).append(t)
    return [
        (pair[0], pair[1])
        for who, pair in times.items()
        if len(pair) == 2 and not isinstance(cluster.world.nodes[who], SourceNode)
    ]


def let_go_soon(cluster: SimCluster) -> None:
    """Pages of rooms that decode gave up are free long before their deadline of 4 s."""
    for t, who, _, thing in cluster.world.history:
        if type(thing).__name__ == "Release" and t > 2.5:
            cluster.world.violate("never leaks", f"{who} kept pages until {t:.2f} s")
    for node in cluster.nodes:
        if node.allocations:
            cluster.world.violate("never leaks", f"{node.peer} still holds pages")


# ---------------------------------------------------------------- the list

STAGED = ClusterShape(policy=EnginePolicy("all"))
ONE_SLOT = ClusterShape(
    policy=EnginePolicy("all"), staging=msgspec.structs.replace(ClusterShape().staging, num_slots=1)
)
# Credits come late, because a slot of the target is used for long.
AHEAD = replace(ONE_SLOT, early_gather_slots=2)
# A source has one slot for two targets, and what waits for a credit may have it.
ONLY_ONE = replace(AHEAD, prefill=Parallel(tp=1), decodes=(Parallel(tp=2),), local_slots=1)
WIDE = ClusterShape(prefill=Parallel(tp=2, pp=2), decodes=(Parallel(tp=2),))
DEEP = ClusterShape(spec=HYBRID, prefill=Parallel(tp=2), decodes=(Parallel(tp=4),))
LOST = (FailureCode.PEER_GONE, FailureCode.PEER_SILENT, FailureCode.PEER_RESTARTED)
TWO_DECODES = ClusterShape(prefill=Parallel(tp=1), decodes=(Parallel(tp=2), Parallel(tp=4)))
TIGHT = ClusterShape(
    policy=EnginePolicy("all"),
    staging=Staging(slot_bytes=16, num_slots=1),
    num_pages=14,
    num_rows=2,
)
EVERYONE = ("decode0", PREFILL)
ALL_KINDS = (Hello, Welcome, Offer, Accept, Want, Grant, Arrived, Close, Complete)

SCENARIOS: dict[str, Scenario] = {
    "C1": Scenario("many sources, each with its own key", jobs(4), all_done, WIDE),
    "C2": Scenario("a dense model's metadata arrives without state", jobs(4), all_done),
    "C3": Scenario(
        "state where there is state, none where there is none",
        jobs(4),
        all_done,
        ClusterShape(spec=HYBRID, prefill=Parallel(tp=2), decodes=(Parallel(tp=4),)),
    ),
    "C4": Scenario(
        "staging requests are all taken", jobs(4, cached=False), staged_something, STAGED
    ),
    "C5": Scenario("chunks arrive out of order", both(shuffle_notes, jobs(4)), all_done, STAGED),
    "C6": Scenario(
        "one writer heard twice is still one writer",
        jobs(4),
        all_done,
        WIDE,
        Faults(duplicate=0.5, duplicate_note=0.9),
    ),
    "C7": Scenario(
        "the first frame of every kind is lost",
        both(lose_first(*ALL_KINDS), jobs(3)),
        all_done,
        STAGED,
    ),
    "C8": Scenario(
        "a write fails to post, and decode hears of it",
        jobs(1, cached=False),
        failed_with("decode0", 0, FailureCode.TRANSPORT),
        ClusterShape(prefill=Parallel(tp=1), policy=EnginePolicy("none")),
        Faults(write_failed=1.0),
    ),
    "C9": Scenario("a prefix hit changes the number of chunks", jobs(8), all_done, TWO_DECODES),
    "C10": Scenario(
        "a room that two requests were given serves neither with the other's cache",
        jobs(1),
        failed_with("decode0", 0, FailureCode.CONTENT_DIFFERS, FailureCode.ABORTED),
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=2),)),
        Faults(mixed_up=1.0),
    ),
    "C11": Scenario("layers are pushed in reverse", layers(4, -1), all_done, DEEP),
    "S1": Scenario(
        "an abort returns its slots",
        both(jobs(2, 0.3), at(0.04, cancel(0, "decode0"))),
        done(1),
        ONE_SLOT,
        Faults(slow_write=0.2),
    ),
    "S2": Scenario("an empty pool fills again", jobs(5, 0.01), all_done, ONE_SLOT),
    "S3": Scenario(
        "a send buffer waits for its write", jobs(5, 0.01), all_done, STAGED, Faults(torn_write=0.5)
    ),
    "S4": Scenario(
        "a deferred write is tried again, once", jobs(4), all_done, STAGED, Faults(busy=0.4)
    ),
    "S5": Scenario(
        "a dead holder of credits blocks nobody",
        both(jobs(3, 0.4), at(0.03, kill(PREFILL, 1, 0.05))),
        done(2),
        ONE_SLOT,
    ),
    "S6": Scenario("credits and pages make no cycle", jobs(6, 0.01), all_done, TIGHT),
    "S7": Scenario(
        "an abort lets go of what was gathered ahead, when that has ended",
        both(
            slow_writes(0.1),
            slow_gathers(0.05),
            jobs(4, 0.1, cached=False),
            at(0.15, cancel(0, PREFILL)),
        ),
        both(done(1), done(3), gathered_ahead),
        AHEAD,
    ),
    "S8": Scenario(
        "the only slot is taken back from who has no credit yet",
        both(slow_gathers(0.01), jobs(4, 0.02, cached=False)),
        both(all_done, gathered_ahead),
        ONLY_ONE,
    ),
    "L1": Scenario(
        "decode gives up while prefill writes",
        both(jobs(3, 0.1), at(0.05, cancel(0, "decode0"))),
        promises_only,
        ClusterShape(num_pages=14),
        Faults(slow_write=0.6, torn_write=0.5),
    ),
    "L2": Scenario(
        "prefill never answers an abort",
        both(
            jobs(1),
            at(0.03, stall(PREFILL, 0, 1.0)),
            at(0.05, cancel(0, "decode0")),
            at(0.5, kill(PREFILL, 0, None)),
        ),
        promises_only,
    ),
    "L3": Scenario(
        "prefill's deadline comes first",
        both(jobs(3), at(0.02, stall("decode0", 0, 1.0))),
        promises_only,
        faults=Faults(short_deadline=0.5, slow_write=0.5),
    ),
    "L4": Scenario(
        "the client cancels before or during the transfer",
        both(jobs(4, 0.05), at(0.01, cancel(0, *EVERYONE)), at(0.16, cancel(2, *EVERYONE))),
        done(3),
    ),
    "L5": Scenario(
        "cleanup needs no new work",
        both(jobs(2), at(0.03, cancel(0, PREFILL)), at(0.08, cancel(1, "decode0"))),
        promises_only,
        faults=Faults(slow_write=0.5),
    ),
    "L6": Scenario(
        "a stopped writer's pages wait for it",
        both(
            slow_writes(1.0),
            jobs(1, cached=False),
            at(0.12, stall(PREFILL, 0, 2.2)),
            at(0.2, cancel(0, "decode0")),
        ),
        quarantine_was_used,
        ClusterShape(prefill=Parallel(tp=1), policy=EnginePolicy("none")),
        Faults(),
    ),
    "L7": Scenario(
        "offers for rooms that never open expire",
        jobs(5),
        promises_only,
        faults=Faults(one_sided=1.0),
    ),
    "L8": Scenario("many rooms leave nothing behind", jobs(40, 0.04), tables_do_not_grow),
    "L9": Scenario(
        "a source dies between two layers of one chunk",
        both(layers(1, 1, 0.2), kill_after_a_layer(PREFILL, 0), at(2.0, jobs(1))),
        both(failed_with("decode0", 0, *LOST, FailureCode.ABORTED), done(1)),
        DEEP,
    ),
    "L10": Scenario(
        "decode gives a room up, and asks for it again while prefill pushes, closes and drains",
        both(jobs(2, 0.05), at(0.03, ask_again(0)), at(0.09, ask_again(1))),
        promises_only,
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=2),)),
        Faults(drop=0.1, delay=0.3, slow_prefill=0.3),
    ),
    "L11": Scenario(
        "decode gives a room up before it could be offered, and prefill lets go of it",
        both(jobs(2, 0.02), at(0.011, cancel(0, "decode0")), at(0.021, cancel(1, "decode0"))),
        let_go_soon,
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=1),)),
        Faults(drop=0.1),
    ),
    "P1": Scenario(
        "a peer restarts under its name",
        both(
            jobs(2, 0.6),
            at(0.3, kill("decode0", 0, 0.05)),
            at(0.9, kill(PREFILL, 0, 0.05)),
            at(1.9, jobs(1)),
        ),
        done(2),
    ),
    "P2": Scenario(
        "a peer speaks another version",
        both(other_version("decode0"), jobs(1)),
        failed_with("decode0", 0, FailureCode.REFUSED),
    ),
    "P3": Scenario(
        "a pair that can't work is refused at the handshake",
        lambda c: c.start(c.draw_job(decode=STRANGER)),
        failed_with(STRANGER, 0, FailureCode.REFUSED),
        faults=Faults(strangers=1),
    ),
    "P4": Scenario("foreign frames stop nothing", both(jobs(3), hostile_frames), all_done, WIDE),
    "P5": Scenario(
        "an index below zero is refused",
        both(jobs(2), hostile_frames),
        both(all_done, malformed_were_refused),
    ),
    "P6": Scenario(
        "an index beyond the pool is refused",
        both(huge_page, jobs(1, cached=False)),
        failed_with("decode0", 0, FailureCode.BAD_OFFER, FailureCode.ABORTED),
        ClusterShape(decodes=(Parallel(tp=2),)),
    ),
    "P7": Scenario("a pickle is just foreign bytes", both(jobs(3), hostile_frames), all_done),
    "P8": Scenario(
        "back-pressure is not death", jobs(4), nobody_was_lost, STAGED, Faults(busy=0.6)
    ),
}
