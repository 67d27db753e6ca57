"""Scripts: functions that start jobs and inject faults in a cluster, for scenarios."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Concatenate, ParamSpec

import msgspec

from kvferry.ids import Peer, Session
from kvferry.layout import Span
from kvferry.plan.plan import Request
from kvferry.protocol.codec import MAGIC, encode
from kvferry.protocol.events import Cancel
from kvferry.protocol.messages import VERSION, Accept, Arrived, Envelope, Offer, PageTableMessage
from kvferry.testing.sim.cluster import SimCluster
from kvferry.testing.sim.engines import TargetNode
from kvferry.testing.sim.jobs import PREFILL, SimHolding, layer_by_layer
from kvferry.testing.sim.pulls import ANOTHER, draw_pull, sequence_chain

P = ParamSpec("P")
Script = Callable[[SimCluster], None]


def script(act: Callable[Concatenate[SimCluster, P], None]) -> Callable[P, Script]:
    """Decorate a function of a cluster and arguments: given the arguments, it returns a script."""
    return lambda *args, **kwargs: lambda cluster: act(cluster, *args, **kwargs)


@script
def all_of(cluster: SimCluster, *scripts: Script) -> None:
    """Run several scripts, or check several demands, in order."""
    for one in scripts:
        one(cluster)


@script
def at(cluster: SimCluster, seconds: float, act: Script) -> None:
    """Run another script at that time."""
    cluster.world.at(seconds, lambda: act(cluster))


# ---------------------------------------------------------------- jobs


@script
def jobs(cluster: SimCluster, count: int, every_s: float = 0.05, *, cached: bool = True) -> None:
    """Start jobs one after the other; with ``cached``, decode may have a prefix already."""
    for index in range(count):
        job = cluster.draw_job(cached=cached, deadline_s=4.0)
        cluster.world.at(index * every_s, partial(cluster.start, job))


@script
def layers(cluster: SimCluster, count: int, order: int, pace_s: float = 0.0) -> None:
    """Start jobs of one chunk each, pushed layer by layer: upwards (1) or downwards (-1)."""
    for _ in range(count):
        job = cluster.draw_job(cached=False, deadline_s=4.0)
        chunk, num_layers = Span(0, job.request.num_tokens), cluster.shape.spec.num_layers
        pushes = tuple(layer_by_layer(chunk, num_layers, states=True)[::order])
        cluster.jobs[-1] = replace(job, pushes=pushes, pace_s=pace_s)
        cluster.start(cluster.jobs[-1])


@script
def cancel(cluster: SimCluster, index: int, *instances: str) -> None:
    """Cancel a job at every rank of these instances."""
    for node in cluster.nodes:
        if node.peer.instance in instances:
            node.deliver(Cancel(cluster.jobs[index].room))


@script
def ask_again(cluster: SimCluster, index: int) -> None:
    """Cancel a job at decode and receive the same room again once its pages are released."""
    job = cluster.jobs[index]

    def again(node: TargetNode) -> None:
        if job.room in node.allocations:
            cluster.world.at(0.01, partial(again, node))
            return
        node.outcomes.pop(job.room, None)
        node.start(job)

    for node in cluster.nodes:
        if isinstance(node, TargetNode):
            node.deliver(Cancel(job.room))
            again(node)


# ---------------------------------------------------------------- pulls


@script
def pull(
    cluster: SimCluster,
    asked: int,
    held: int,
    sides: tuple[str, str] = (PREFILL, "decode0"),
    *,
    lies: bool = False,
) -> None:
    """Pull ``asked`` tokens from a holder that has ``held``, of another sequence if it lies."""
    job = draw_pull(cluster, sides)
    cluster.jobs[-1] = job = replace(
        job,
        request=Request(asked),
        chain=sequence_chain(job.number, asked),
        held=SimHolding(job.number + ANOTHER * lies, held),
        deadline_s=4.0,
    )
    cluster.start(job)


@script
def at_first(cluster: SimCluster, kind: type, act: Script) -> None:
    """Run another script when the first frame of a kind is sent."""
    seen: list[Envelope] = []

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        if isinstance(envelope.body, kind) and not seen:
            seen.append(envelope)
            cluster.world.at(0.0, lambda: act(cluster))
        return None

    cluster.world.intercept = intercept


@script
def change(cluster: SimCluster, /, kind: type, **fields: object) -> None:
    """Change fields of every frame of a kind."""
    world = cluster.world

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        if not isinstance(envelope.body, kind):
            return None
        other = msgspec.structs.replace(envelope.body, **fields)
        frame = encode(msgspec.structs.replace(envelope, body=other))
        world.at(0.002, partial(world.arrive, to, frame))
        return []

    world.intercept = intercept


# ---------------------------------------------------------------- processes and time


@script
def kill(cluster: SimCluster, instance: str, rank: int, revive_after: float | None) -> None:
    """Kill one process."""
    cluster.kill(cluster.world.nodes[Peer(instance, rank)], revive_after)


@script
def stall(cluster: SimCluster, instance: str, rank: int, seconds: float) -> None:
    """Stop one process for a while."""
    cluster.world.nodes[Peer(instance, rank)].process.stall(seconds)


@script
def slow_writes(cluster: SimCluster, seconds: float) -> None:
    """Make every write take longer."""
    cluster.wire.extra_s = seconds


@script
def slow_gathers(cluster: SimCluster, seconds: float) -> None:
    """Make every early gather take longer."""
    cluster.wire.gathers.extra_s = seconds


# ---------------------------------------------------------------- frames


@script
def kill_after_a_layer(cluster: SimCluster, instance: str, rank: int) -> None:
    """Kill one process when it announces its first write."""
    world, killed = cluster.world, list[Envelope]()

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        if sender == Peer(instance, rank) and isinstance(envelope.body, Arrived) and not killed:
            killed.append(envelope)
            world.at(0.0, lambda: cluster.kill(world.nodes[sender], 0.5))
        return None

    world.intercept = intercept


@script
def cut(cluster: SimCluster, one: Peer, other: Peer, until: float) -> None:
    """Drop all frames between two peers until that time."""
    cluster.world.intercept = lambda sender, to, envelope: (
        [] if {sender, to} == {one, other} and cluster.world.now < until else None
    )


@script
def lose_first(cluster: SimCluster, *kinds: type) -> None:
    """Lose the first frame of each kind on each pair."""
    seen: set[tuple[Peer, Peer, type]] = set()

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        key = (sender, to, type(envelope.body))
        if key[2] in kinds and key not in seen:
            seen.add(key)
            cluster.world.counts["lost-" + key[2].__name__] += 1
            return []
        return None

    cluster.world.intercept = intercept


def shuffle_notes(cluster: SimCluster) -> None:
    """Delay each arrival note by up to half a second."""
    rng = cluster.world.rng
    cluster.world.intercept = lambda sender, to, envelope: (
        [rng.random() * 0.5] if isinstance(envelope.body, Arrived) else None
    )


@script
def other_version(cluster: SimCluster, instance: str) -> None:
    """Give every frame of an instance a later protocol version."""
    world = cluster.world

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        if sender.instance != instance:
            return None
        fields = msgspec.msgpack.decode(encode(envelope))
        fields[1] = VERSION + 1
        world.at(0.002, partial(world.arrive, to, msgspec.msgpack.encode(fields)))
        return []

    world.intercept = intercept


def hostile_frames(cluster: SimCluster) -> None:
    """Send foreign, malformed and hostile bytes to every node."""
    session, sender = Session(1, 1), Peer("decode0", 0)
    head = [MAGIC, VERSION, ["decode0", 0], 1001, [1001, 1], 5]
    table = ["kv", [-8], 0]
    frames = [
        b"",
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps({"room": 1}),
        msgspec.msgpack.encode([*head, ["offer", 1, 1, {"num_tokens": 4}, [table], 1.0]]),
        msgspec.msgpack.encode([*head, ["grant", 1, 1, [[-8, 0]]]]),
        b"\xdd\xff\xff\xff\xff",
        encode(Envelope(sender, 7, session, 3, Accept(1, 1))),  # type: ignore[arg-type]
    ]
    for node in cluster.nodes:
        for index, frame in enumerate(frames):
            cluster.world.at(0.01 * index, partial(cluster.world.arrive, node.peer, frame))


def huge_page(cluster: SimCluster) -> None:
    """Make targets offer a page that their pools do not have."""

    def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
        body = envelope.body
        if not isinstance(body, Offer) or any(1 << 61 in t.pages for t in body.tables):
            return None
        tables = tuple(PageTableMessage(t.group, (1 << 61, *t.pages[1:])) for t in body.tables)
        bad = msgspec.structs.replace(envelope, body=msgspec.structs.replace(body, tables=tables))
        cluster.world.send(sender, to, bad)
        return []

    cluster.world.intercept = intercept
