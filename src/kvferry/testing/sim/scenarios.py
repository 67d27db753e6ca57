"""Named scenarios: situations in which other systems of this kind have failed.

C is for completion, S for staging, L for lifetime, P for peers, A for asking a holder. Each has a
script and a demand, which is checked in addition to the promises that hold in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from kvferry.ids import Peer
from kvferry.layout import Parallel
from kvferry.protocol.events import Discard, Gather, Post, Release, Report
from kvferry.protocol.messages import (
    Accept,
    Arrived,
    Ask,
    Close,
    Complete,
    Grant,
    Hello,
    Holding,
    NoSession,
    Offer,
    Staging,
    Want,
    Welcome,
)
from kvferry.protocol.outcome import Done, Failure, FailureCode
from kvferry.testing.sim.cluster import BACK, FRONT, HYBRID, STRANGER, ClusterShape, SimCluster
from kvferry.testing.sim.engines import EnginePolicy, SourceNode
from kvferry.testing.sim.jobs import PREFILL
from kvferry.testing.sim.scripts import (
    Script,
    all_of,
    ask_again,
    at,
    at_first,
    cancel,
    change,
    cut,
    hostile_frames,
    huge_page,
    jobs,
    kill,
    kill_after_a_layer,
    layers,
    lose_first,
    other_version,
    pull,
    script,
    shuffle_notes,
    slow_gathers,
    slow_writes,
    stall,
)
from kvferry.testing.sim.world import Faults


@dataclass(frozen=True)
class Scenario:
    """A cluster's shape and faults, the script that runs in it, and what must follow."""

    title: str
    script: Script
    demand: Script
    shape: ClusterShape = field(default_factory=ClusterShape)
    faults: Faults = field(default_factory=Faults)


# ---------------------------------------------------------------- demands


@script
def done(cluster: SimCluster, *indices: int) -> None:
    """Demand that these jobs are done at every rank; all jobs if none is named."""
    for job in [cluster.jobs[index] for index in indices] or cluster.jobs:
        if not cluster.is_done(job):
            cluster.world.violate("never hangs", f"{cluster.failures(job)}", job.room)


all_done = done()


def promises_only(cluster: SimCluster) -> None:
    """Demand nothing beyond the promises."""


def _seen(cluster: SimCluster) -> list[object]:
    """Return every event and action in the history."""
    return [thing for _, _, _, thing in cluster.world.history]


def staged_something(cluster: SimCluster) -> None:
    """Demand that every job is done, some of it through staging."""
    all_done(cluster)
    if all(getattr(thing, "local_slot", None) is None for thing in _seen(cluster)):
        cluster.world.violate("never hangs", "nothing was staged")


def gathered_early(cluster: SimCluster) -> None:
    """Demand that slots were gathered before their credits came, some posted, some discarded."""
    seen = set(map(type, _seen(cluster)))
    if not seen.issuperset({Gather, Post, Discard}):
        cluster.world.violate("never hangs", f"nothing was gathered early: {seen}")


@script
def pulled(cluster: SimCluster, *tokens: int) -> None:
    """Demand that the jobs, in order, have brought these numbers of tokens to every rank."""
    for job, expected in zip(cluster.jobs, tokens, strict=False):
        for node in cluster.nodes:
            outcome = node.outcomes.get(job.room)
            if node.peer.instance != job.decode:
                continue
            if not isinstance(outcome, Done) or outcome.pulled != expected:
                cluster.world.violate("never hangs", f"{node.peer}: {outcome}", job.room)


@script
def failed_with(cluster: SimCluster, instance: str, index: int, *codes: FailureCode) -> None:
    """Demand that a job failed at every rank of the instance, for one of these reasons."""
    job = cluster.jobs[index]
    for node in cluster.nodes:
        outcome = node.outcomes.get(job.room)
        if node.peer.instance != instance:
            continue
        if not isinstance(outcome, Failure) or outcome.code not in codes:
            cluster.world.violate("refuses early", f"{node.peer}: {outcome}", job.room)


def malformed_were_refused(cluster: SimCluster) -> None:
    """Demand that malformed frames were refused as such and counted."""
    if not cluster.world.counts["refused-malformed"]:
        cluster.world.violate("lets nobody in", "a negative index was not refused")


def nobody_was_lost(cluster: SimCluster) -> None:
    """Demand that every job is done and no peer was taken for dead."""
    all_done(cluster)
    if any("Disconnect" in type(thing).__name__ for thing in _seen(cluster)):
        cluster.world.violate("never hangs", "back-pressure was taken for death")


def tables_do_not_grow(cluster: SimCluster) -> None:
    """Demand that a machine keeps no more after many rooms than after one."""
    all_done(cluster)
    for node in cluster.nodes:
        links = len(node.machine.links)
        if links > len(cluster.nodes):
            cluster.world.violate("never leaks", f"{node.peer} has {links} links")


def links_are_closed(cluster: SimCluster) -> None:
    """Demand that no machine has a link after a second without rooms."""
    for node in cluster.nodes:
        if node.machine.links:
            cluster.world.violate("never leaks", f"{node.peer} keeps idle links")


def quarantine_was_used(cluster: SimCluster) -> None:
    """Demand that pages of the first job waited for a stopped writer."""
    times: dict[Peer, list[float]] = {}
    for t, who, _, thing in cluster.world.history:
        if isinstance(thing, Report | Release) and thing.room == cluster.jobs[0].room:
            times.setdefault(who, []).append(t)
    waited = [
        pair[1] - pair[0]
        for who, pair in times.items()
        if len(pair) == 2 and not isinstance(cluster.world.nodes[who], SourceNode)
    ]
    if not waited or max(waited) < 0.5:
        cluster.world.violate("never reuses", f"pages were released after {waited}")


def released_soon(cluster: SimCluster) -> None:
    """Demand that pages of cancelled rooms are free long before their deadline of 4 s."""
    for t, who, _, thing in cluster.world.history:
        if isinstance(thing, Release) and t > 2.5:
            cluster.world.violate("never leaks", f"{who} kept pages until {t:.2f} s")
    for node in cluster.nodes:
        if node.allocations:
            cluster.world.violate("never leaks", f"{node.peer} still holds pages")


# ---------------------------------------------------------------- the list

STAGED = ClusterShape(policy=EnginePolicy("all"))
ONE_SLOT = ClusterShape(
    policy=EnginePolicy("all"), staging=msgspec.structs.replace(ClusterShape().staging, num_slots=1)
)
# Credits come late, because a target's only slot is busy for long.
EARLY = replace(ONE_SLOT, early_gather_slots=2)
# A source has one slot for two targets; a gather that waits for a credit may hold it.
ONLY_SLOT = replace(EARLY, prefill=Parallel(tp=1), decodes=(Parallel(tp=2),), local_slots=1)
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
PULLS = ClusterShape(
    prefill=Parallel(tp=2), decodes=(Parallel(tp=2),), num_pages=160, num_rows=24, pulls=1
)
ALL_KINDS = (Hello, Welcome, Offer, Accept, Want, Grant, Arrived, Close, Complete)

SCENARIOS: dict[str, Scenario] = {
    "C1": Scenario("each of many sources has a key of its own", jobs(4), all_done, WIDE),
    "C2": Scenario("a dense model's metadata arrives without state", jobs(4), all_done),
    "C3": Scenario(
        "state rows are sent and expected only where the model has them",
        jobs(4),
        all_done,
        DEEP,
    ),
    "C4": Scenario(
        "every staging request is served", jobs(4, cached=False), staged_something, STAGED
    ),
    "C5": Scenario("chunks arrive out of order", all_of(shuffle_notes, jobs(4)), all_done, STAGED),
    "C6": Scenario(
        "duplicate messages do not count as another source",
        jobs(4),
        all_done,
        WIDE,
        Faults(duplicate=0.5, duplicate_note=0.9),
    ),
    "C7": Scenario(
        "the first frame of every kind is lost",
        all_of(lose_first(*ALL_KINDS), jobs(3)),
        all_done,
        STAGED,
    ),
    "C8": Scenario(
        "decode learns that a write has failed",
        jobs(1, cached=False),
        failed_with("decode0", 0, FailureCode.TRANSPORT),
        ClusterShape(prefill=Parallel(tp=1), policy=EnginePolicy("none")),
        Faults(write_failed=1.0),
    ),
    "C9": Scenario("a prefix hit changes the number of chunks", jobs(8), all_done, TWO_DECODES),
    "C10": Scenario(
        "two requests with one room never get each other's cache",
        jobs(1),
        failed_with("decode0", 0, FailureCode.CONTENT_DIFFERS, FailureCode.ABORTED),
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=2),)),
        Faults(mixed_up=1.0),
    ),
    "C11": Scenario("layers are pushed in reverse", layers(4, -1), all_done, DEEP),
    "S1": Scenario(
        "an abort returns its slots",
        all_of(jobs(2, 0.3), at(0.04, cancel(0, "decode0"))),
        done(1),
        ONE_SLOT,
        Faults(slow_write=0.2),
    ),
    "S2": Scenario("a pool without free slots recovers", jobs(5, 0.01), all_done, ONE_SLOT),
    "S3": Scenario(
        "a send buffer waits for its write", jobs(5, 0.01), all_done, STAGED, Faults(torn_write=0.5)
    ),
    "S4": Scenario(
        "a deferred write is tried again, once", jobs(4), all_done, STAGED, Faults(busy=0.4)
    ),
    "S5": Scenario(
        "a source that dies with credits blocks no other source",
        all_of(jobs(3, 0.4), at(0.03, kill(PREFILL, 1, 0.05))),
        done(2),
        ONE_SLOT,
    ),
    "S6": Scenario("credits and pages make no cycle", jobs(6, 0.01), all_done, TIGHT),
    "S7": Scenario(
        "an abort frees early-gathered slots when their gathers have ended",
        all_of(
            slow_writes(0.1),
            slow_gathers(0.05),
            jobs(4, 0.1, cached=False),
            at(0.15, cancel(0, PREFILL)),
        ),
        all_of(done(1), done(3), gathered_early),
        EARLY,
    ),
    "S8": Scenario(
        "the only slot is taken back from a gather without a credit",
        all_of(slow_gathers(0.01), jobs(4, 0.02, cached=False)),
        all_of(all_done, gathered_early),
        ONLY_SLOT,
    ),
    "L1": Scenario(
        "decode cancels while prefill writes",
        all_of(jobs(3, 0.1), at(0.05, cancel(0, "decode0"))),
        promises_only,
        ClusterShape(num_pages=14),
        Faults(slow_write=0.6, torn_write=0.5),
    ),
    "L2": Scenario(
        "prefill never answers an abort",
        all_of(
            jobs(1),
            at(0.03, stall(PREFILL, 0, 1.0)),
            at(0.05, cancel(0, "decode0")),
            at(0.5, kill(PREFILL, 0, None)),
        ),
        promises_only,
    ),
    "L3": Scenario(
        "prefill's deadline comes first",
        all_of(jobs(3), at(0.02, stall("decode0", 0, 1.0))),
        promises_only,
        faults=Faults(short_deadline=0.5, slow_write=0.5),
    ),
    "L4": Scenario(
        "the client cancels before or during the transfer",
        all_of(jobs(4, 0.05), at(0.01, cancel(0, *EVERYONE)), at(0.16, cancel(2, *EVERYONE))),
        done(3),
    ),
    "L5": Scenario(
        "cleanup needs no new work",
        all_of(jobs(2), at(0.03, cancel(0, PREFILL)), at(0.08, cancel(1, "decode0"))),
        promises_only,
        faults=Faults(slow_write=0.5),
    ),
    "L6": Scenario(
        "pages are quarantined while their writer is stopped",
        all_of(
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
        all_of(layers(1, 1, 0.2), kill_after_a_layer(PREFILL, 0), at(2.0, jobs(1))),
        all_of(failed_with("decode0", 0, *LOST, FailureCode.ABORTED), done(1)),
        DEEP,
    ),
    "L10": Scenario(
        "decode cancels a room and asks for it again while prefill pushes, closes and drains",
        all_of(jobs(2, 0.05), at(0.03, ask_again(0)), at(0.09, ask_again(1))),
        promises_only,
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=2),)),
        Faults(drop=0.1, delay=0.3, slow_prefill=0.3),
    ),
    "L11": Scenario(
        "prefill releases a room that decode cancelled before its offer",
        all_of(jobs(2, 0.02), at(0.011, cancel(0, "decode0")), at(0.021, cancel(1, "decode0"))),
        released_soon,
        ClusterShape(prefill=Parallel(tp=2), decodes=(Parallel(tp=1),)),
        Faults(drop=0.1),
    ),
    "P1": Scenario(
        "a peer restarts under its name",
        all_of(
            jobs(2, 0.6),
            at(0.3, kill("decode0", 0, 0.05)),
            at(0.9, kill(PREFILL, 0, 0.05)),
            at(1.9, jobs(1)),
        ),
        done(2),
    ),
    "P2": Scenario(
        "a peer speaks another version",
        all_of(other_version("decode0"), jobs(1)),
        failed_with("decode0", 0, FailureCode.REFUSED),
    ),
    "P3": Scenario(
        "a pair that can't work is refused at the handshake",
        lambda c: c.start(c.draw_job(decode=STRANGER)),
        failed_with(STRANGER, 0, FailureCode.REFUSED),
        faults=Faults(strangers=1),
    ),
    "P4": Scenario("foreign frames stop nothing", all_of(jobs(3), hostile_frames), all_done, WIDE),
    "P5": Scenario(
        "an index below zero is refused",
        all_of(jobs(2), hostile_frames),
        all_of(all_done, malformed_were_refused),
    ),
    "P6": Scenario(
        "an index beyond the pool is refused",
        all_of(huge_page, jobs(1, cached=False)),
        failed_with("decode0", 0, FailureCode.BAD_OFFER, FailureCode.ABORTED),
        ClusterShape(decodes=(Parallel(tp=2),)),
    ),
    "P7": Scenario("a pickle is just foreign bytes", all_of(jobs(3), hostile_frames), all_done),
    "P8": Scenario(
        "back-pressure is not death",
        jobs(4),
        nobody_was_lost,
        replace(STAGED, idle_s=60.0),
        Faults(busy=0.6),
    ),
    "P9": Scenario(
        "links close when idle, whatever is lost, and open again",
        all_of(
            jobs(2, cached=False),
            at(2.2, links_are_closed),
            at(2.2, lose_first(NoSession)),
            at(2.2, jobs(2, cached=False)),
        ),
        all_of(all_done, links_are_closed),
        TWO_DECODES,
    ),
    "A1": Scenario(
        "each rank that asks gets one answer: all, a part or nothing",
        all_of(pull(32, 32), pull(32, 16), pull(16, 0)),
        pulled(32, 16, 0),
        PULLS,
    ),
    "A2": Scenario(
        "the first Ask and the first Holding are lost",
        all_of(lose_first(Ask, Holding), pull(32, 16), pull(16, 0)),
        pulled(16, 0),
        PULLS,
    ),
    "A3": Scenario(
        "a pull moves windows and state at the length that is held",
        all_of(pull(32, 16), pull(32, 32)),
        pulled(16, 32),
        replace(PULLS, spec=HYBRID, decodes=(Parallel(tp=4),)),
    ),
    "A4": Scenario(
        "a holder dies between its answer and the transfer",
        all_of(at_first(Holding, kill(PREFILL, 0, 0.05)), pull(32, 32), at(2.0, jobs(1))),
        all_of(failed_with("decode0", 0, *LOST, FailureCode.ABORTED), done(1)),
        PULLS,
    ),
    "A5": Scenario(
        "two instances pull from each other at once",
        all_of(*(pull(32, 32, sides) for sides in ((PREFILL, "decode0"), (BACK, FRONT)) * 3)),
        pulled(*[32] * 6),
        replace(PULLS, mutual=True),
    ),
    "A6": Scenario(
        "a holder of another sequence is refused",
        pull(32, 32, lies=True),
        failed_with("decode0", 0, FailureCode.CONTENT_DIFFERS, FailureCode.ABORTED),
        PULLS,
    ),
    "A7": Scenario(
        "a pin that one rank never claims ends in time",
        pull(32, 32),
        released_soon,
        PULLS,
        Faults(one_sided=1.0),
    ),
    "A8": Scenario(
        "a rank that asks and vanishes leaves no pin",
        all_of(at_first(Ask, kill("decode0", 0, None)), pull(32, 32)),
        released_soon,
        PULLS,
    ),
    "A9": Scenario(
        "a pull that is given up before its answer is unpinned",
        all_of(at_first(Ask, cancel(0, "decode0")), pull(32, 32)),
        released_soon,
        PULLS,
        Faults(drop=0.1),
    ),
    "A10": Scenario(
        "an answer beyond the question is refused",
        all_of(change(Holding, num_tokens=48), pull(32, 32)),
        failed_with("decode0", 0, FailureCode.BAD_NOTE, FailureCode.ABORTED),
        PULLS,
    ),
    "A11": Scenario(
        "a source that does not know Ask holds nothing",
        all_of(change(Welcome, answers=False), pull(32, 32)),
        pulled(0),
        PULLS,
    ),
    "A12": Scenario(
        "a holder restarts between two ranks' questions, and its answers differ",
        all_of(
            cut(Peer("decode0", 1), Peer(PREFILL, 0), 0.6),
            at(0.5, kill(PREFILL, 0, 0.05)),
            pull(32, 32),
        ),
        promises_only,
        PULLS,
    ),
}
