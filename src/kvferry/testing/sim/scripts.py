"""Scripts: functions that start jobs and inject faults in a cluster, for scenarios."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from kvferry.ids import Peer, Session
from kvferry.layout import Span
from kvferry.protocol.codec import MAGIC, encode
from kvferry.protocol.events import Cancel
from kvferry.protocol.messages import VERSION, Accept, Arrived, Envelope, Offer, PageTableMessage
from kvferry.testing.sim.cluster import SimCluster
from kvferry.testing.sim.engines import TargetNode
from kvferry.testing.sim.jobs import layer_by_layer

Script = Callable[[SimCluster], None]


def jobs(count: int, every_s: float = 0.05, *, cached: bool = True) -> Script:
    """Start jobs one after the other; with ``cached``, decode may have a prefix already."""

    def script(cluster: SimCluster) -> None:
        for index in range(count):
            job = cluster.draw_job(cached=cached, deadline_s=4.0)
            cluster.world.at(index * every_s, partial(cluster.start, job))

    return script


def layers(count: int, order: int, pace_s: float = 0.0) -> Script:
    """Start jobs of one chunk each, pushed layer by layer: upwards (1) or downwards (-1)."""

    def script(cluster: SimCluster) -> None:
        for _ in range(count):
            job = cluster.draw_job(cached=False, deadline_s=4.0)
            chunk, num_layers = Span(0, job.request.num_tokens), cluster.shape.spec.num_layers
            pushes = tuple(layer_by_layer(chunk, num_layers, states=True)[::order])
            cluster.jobs[-1] = replace(job, pushes=pushes, pace_s=pace_s)
            cluster.start(cluster.jobs[-1])

    return script


def all_of(*scripts: Script) -> Script:
    """Run several scripts, or check several demands, in order."""

    def script(cluster: SimCluster) -> None:
        for one in scripts:
            one(cluster)

    return script


def at(seconds: float, act: Script) -> Script:
    """Run another script at that time."""
    return lambda cluster: cluster.world.at(seconds, lambda: act(cluster))


def kill(instance: str, rank: int, revive_after: float | None) -> Script:
    """Kill one process."""
    return lambda c: c.kill(c.world.nodes[Peer(instance, rank)], revive_after)


def kill_after_a_layer(instance: str, rank: int) -> Script:
    """Kill one process when it announces its first write."""

    def script(cluster: SimCluster) -> None:
        world, killed = cluster.world, list[Envelope]()

        def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
            if sender == Peer(instance, rank) and isinstance(envelope.body, Arrived) and not killed:
                killed.append(envelope)
                world.at(0.0, lambda: cluster.kill(world.nodes[sender], 0.5))
            return None

        world.intercept = intercept

    return script


def stall(instance: str, rank: int, seconds: float) -> Script:
    """Stop one process for a while."""
    return lambda c: c.world.nodes[Peer(instance, rank)].process.stall(seconds)


def cancel(index: int, *instances: str) -> Script:
    """Cancel a job at every rank of these instances."""

    def script(cluster: SimCluster) -> None:
        for node in cluster.nodes:
            if node.peer.instance in instances:
                node.deliver(Cancel(cluster.jobs[index].room))

    return script


def ask_again(index: int) -> Script:
    """Cancel a job at decode and receive the same room again once its pages are released."""

    def again(cluster: SimCluster, node: TargetNode) -> None:
        job = cluster.jobs[index]
        if job.room in node.allocations:
            cluster.world.at(0.01, partial(again, cluster, node))
            return
        node.outcomes.pop(job.room, None)
        node.start(job)

    def script(cluster: SimCluster) -> None:
        for node in cluster.nodes:
            if isinstance(node, TargetNode):
                node.deliver(Cancel(cluster.jobs[index].room))
                again(cluster, node)

    return script


def lose_first(*kinds: type) -> Script:
    """Lose the first frame of each kind on each pair."""

    def script(cluster: SimCluster) -> None:
        seen: set[tuple[Peer, Peer, type]] = set()

        def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
            key = (sender, to, type(envelope.body))
            if key[2] in kinds and key not in seen:
                seen.add(key)
                cluster.world.counts["lost-" + key[2].__name__] += 1
                return []
            return None

        cluster.world.intercept = intercept

    return script


def slow_writes(seconds: float) -> Script:
    """Make every write take longer."""

    def script(cluster: SimCluster) -> None:
        cluster.wire.extra_s = seconds

    return script


def slow_gathers(seconds: float) -> Script:
    """Make every early gather take longer."""

    def script(cluster: SimCluster) -> None:
        cluster.wire.gathers.extra_s = seconds

    return script


def shuffle_notes(cluster: SimCluster) -> None:
    """Delay each arrival note by up to half a second."""
    rng = cluster.world.rng
    cluster.world.intercept = lambda sender, to, envelope: (
        [rng.random() * 0.5] if isinstance(envelope.body, Arrived) else None
    )


def other_version(instance: str) -> Script:
    """Give every frame of an instance a later protocol version."""

    def script(cluster: SimCluster) -> None:
        world = cluster.world

        def intercept(sender: Peer, to: Peer, envelope: Envelope) -> list[float] | None:
            if sender.instance != instance:
                return None
            fields = msgspec.msgpack.decode(encode(envelope))
            fields[1] = VERSION + 1
            frame = msgspec.msgpack.encode(fields)
            world.at(0.002, lambda: world.arrive(to, frame))
            return []

        world.intercept = intercept

    return script


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
