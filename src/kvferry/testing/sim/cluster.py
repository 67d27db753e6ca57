"""A small cluster: one prefill instance, one or two decode instances, and their jobs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from kvferry.config import ProtocolConfig
from kvferry.endpoint.runner.runner import (
    Ports,
    SourcePorts,
    SourceRunner,
    TargetPorts,
    TargetRunner,
)
from kvferry.endpoint.runner.sessions import Sessions
from kvferry.ids import Peer, Room
from kvferry.layout import (
    CacheSpec,
    DType,
    Group,
    Layout,
    Order,
    Paged,
    Parallel,
    Span,
    StateRow,
    Tensor,
    Window,
)
from kvferry.plan.places import PoolMap
from kvferry.plan.plan import Request
from kvferry.protocol.events import Cancel, Instance, PeerRestarted
from kvferry.protocol.links import Identity
from kvferry.protocol.messages import Staging
from kvferry.protocol.outcome import Done
from kvferry.protocol.source import SourceMachine, SourceParts
from kvferry.protocol.target import TargetMachine, TargetParts
from kvferry.testing.sim import pulls
from kvferry.testing.sim.engines import EnginePolicy, SourceNode, TargetNode
from kvferry.testing.sim.jobs import PREFILL, SimJob, draw_pushes
from kvferry.testing.sim.memory import SimMemory
from kvferry.testing.sim.nodes import Node
from kvferry.testing.sim.wire import TRANSPORTS, Wire
from kvferry.testing.sim.world import Faults, World

MODEL = "model-1"
# The source endpoint of the first decode instance, and the target endpoint of the prefill instance.
BACK, FRONT = "decode0-holds", "prefill-pulls"
SOURCES = (PREFILL, BACK)
# Both endpoints of an instance are in one process, and have one memory.
SAME_PROCESS = {PREFILL: FRONT, FRONT: PREFILL, "decode0": BACK, BACK: "decode0"}
STRANGER = "stranger"
OTHER_MODEL = "model-2"
# Jobs with a number from here on have the room of another job.
MIXED_UP = 1000
CONFIG = ProtocolConfig(
    heartbeat_s=0.8,
    silence_s=1.8,
    idle_s=1.0,
    handshake_s=1.5,
    resend_s=0.15,
    status_poll_s=0.4,
    unclaimed_offer_ttl_s=1.5,
    credit_patience_s=0.3,
    max_quarantined_rooms=16,
    max_inflight=6,
    credits_per_source=2,
    local_slots=2,
)

DENSE = CacheSpec(
    2,
    (Group("kv", Paged(), (0, 1), 4, (Tensor("k", DType.UINT8, 2), Tensor("v", DType.UINT8, 1))),),
)
HYBRID = CacheSpec(
    3,
    (
        Group("kv", Paged(), (1,), 2, (Tensor("k", DType.UINT8, 1),)),
        Group("swa", Window(4), (0,), 2, (Tensor("k", DType.UINT8, 1),)),
        Group("state", StateRow(), (2,), 4, (Tensor("s", DType.UINT8, 3),)),
    ),
)
LATENT = CacheSpec(3, (Group("latent", Paged(), (0, 1, 2), 1, (Tensor("c", DType.UINT8, 2),)),))


TP1, TP2 = Parallel(), Parallel(tp=2)
SMALL = Staging(slot_bytes=16, num_slots=2)


@dataclass(frozen=True)
class Machines:
    """The machines to run and the runners that drive them; broken rules replace some."""

    source: type[SourceMachine] = SourceMachine
    target: type[TargetMachine] = TargetMachine
    source_parts: SourceParts = field(default_factory=SourceParts)
    target_parts: TargetParts = field(default_factory=TargetParts)
    source_runner: type[SourceRunner] = SourceRunner
    target_runner: type[TargetRunner] = TargetRunner
    sessions: type[Sessions] = Sessions
    source_node: type[SourceNode] = SourceNode
    ports: Callable[[Any], Any] = lambda ports: ports

    def new_source(
        self, identity: Identity, config: ProtocolConfig, ports: SourcePorts
    ) -> SourceRunner:
        """Return the runner of a new source machine."""
        machine = self.source(identity, config, self.source_parts)
        return self.source_runner(machine, self.ports(ports), self.sessions(exposed=False))

    def new_target(
        self,
        identity: Identity,
        config: ProtocolConfig,
        pools: PoolMap,
        staging: Staging,
        ports: TargetPorts,
    ) -> TargetRunner:
        """Return the runner of a new target machine."""
        machine = self.target(identity, config, pools, staging, self.target_parts)
        return self.target_runner(machine, self.ports(ports), self.sessions(exposed=True))


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """The geometry of a cluster, and how many pulls are among its jobs.

    ``mutual``: the prefill instance and the first decode instance may pull from each other.
    """

    spec: CacheSpec = DENSE
    prefill: Parallel = TP2
    decodes: tuple[Parallel, ...] = (TP1,)
    pages: tuple[int, int] = (4, 2)
    orders: tuple[Order, Order] = (Order.NHD, Order.NHD)
    staging: Staging = SMALL
    policy: EnginePolicy = field(default_factory=EnginePolicy)
    early_gather_slots: int = 0
    local_slots: int | None = None
    idle_s: float = CONFIG.idle_s
    # Parts of the rooms, and of their cells, whose content is proven.
    proof: tuple[float, float] = (0.0, 1.0)
    num_pages: int = 24
    num_rows: int = 6
    pulls: int = 0
    mutual: bool = False

    @staticmethod
    def draw(rng: random.Random, faults: Faults) -> ClusterShape:
        """Draw a small geometry, with tight pools if the faults ask for them."""
        spec = rng.choice([DENSE, DENSE, HYBRID, LATENT])
        tps = [1, 2, 4]
        shared = Parallel(cp=2, interleave=rng.choice([1, 3]))
        sides = [*(Parallel(tp=tp) for tp in tps), shared, Parallel(tp=2, pp=2)]
        prefill = rng.choice(sides)
        decodes = tuple(rng.choice(sides[:4]) for _ in range(rng.choice([1, 1, 2])))
        tight = bool(faults.tight_pools)
        return ClusterShape(
            spec=spec,
            prefill=prefill,
            decodes=decodes,
            pages=(rng.choice([2, 4]), rng.choice([1, 2, 4])),
            orders=(rng.choice(list(Order)), rng.choice(list(Order))),
            staging=Staging(rng.choice([8, 16, 64]), 1 if tight else rng.choice([0, 2, 4])),
            policy=EnginePolicy(rng.choice(["all", "none", "mixed", "random"])),
            num_pages=14 if tight else 40,
            num_rows=2 if tight else 8,
            early_gather_slots=rng.choice([0, 1, 2]),
            local_slots=rng.choice([None, None, 1]),
            # Only a full proof is sure to find a wrong byte.
            proof=(1.0, 1.0)
            if faults.flip
            else rng.choice([(0.0, 1.0), (1.0, 1.0), (1.0, 0.5), (0.5, 1.0)]),
        )

    @property
    def config(self) -> ProtocolConfig:
        """Times and limits, with enough local slots for early gathers."""
        local_slots = self.local_slots or max(CONFIG.local_slots, 2 * self.early_gather_slots)
        return msgspec.structs.replace(
            CONFIG,
            early_gather_slots=self.early_gather_slots,
            local_slots=local_slots,
            idle_s=self.idle_s,
            proof_rooms=self.proof[0],
            proof_share=self.proof[1],
        )


class SimCluster:
    """The nodes of a world, with ways to start jobs and to kill nodes."""

    def __init__(
        self, seed: int, faults: Faults, shape: ClusterShape, machines: Machines, calm_at: float
    ) -> None:
        self.world = World(seed, faults, calm_at=calm_at)
        self.wire = Wire(self.world)
        self.shape = shape
        self.machines = machines
        self.jobs: list[SimJob] = []
        self._lives = 0
        self.prefill = Layout(
            shape.spec, shape.prefill, page_tokens=shape.pages[0], order=shape.orders[0]
        )
        self.decodes = {
            f"decode{i}": Layout(
                shape.spec, sharding, page_tokens=shape.pages[1], order=shape.orders[1]
            )
            for i, sharding in enumerate(shape.decodes)
        }
        self.layouts = {PREFILL: self.prefill, **self.decodes}
        if shape.mutual:
            self.layouts |= {FRONT: self.prefill, BACK: self.decodes["decode0"]}
        self.pull_sides = [(PREFILL, name) for name in self.decodes]
        self.pull_sides += [(BACK, FRONT)] * shape.mutual
        for name, layout in self.layouts.items():
            for rank in range(layout.num_ranks):
                self.boot(Peer(name, rank))
        if faults.strangers:
            self.boot(Peer(STRANGER, 0))

    @property
    def nodes(self) -> list[Node]:
        """Every node, dead or alive."""
        return list(self.world.nodes.values())

    @property
    def sources(self) -> list[SourceNode]:
        """Every node of a source."""
        return [node for node in self.nodes if isinstance(node, SourceNode)]

    # ------------------------------------------------------------ processes

    def boot(self, peer: Peer) -> Node:
        """Start a process in a new incarnation."""
        self._lives += 1
        node = self._source(peer) if peer.instance in SOURCES else self._target(peer)
        self.world.nodes[peer] = node
        return node

    def _memory(self, peer: Peer, num_slots: int) -> SimMemory:
        """Return a rank's memory: that of the other endpoint of its process if there is one."""
        other = self._beside(peer)
        if other is not None and other.process.alive:
            return other.memory.beside(num_slots)
        shape = self.shape
        layout = self.layouts["decode0" if peer.instance == STRANGER else peer.instance]
        slot_bytes = shape.staging.slot_bytes
        return SimMemory(layout, peer.rank, shape.num_pages, shape.num_rows, num_slots, slot_bytes)

    def _source(self, peer: Peer) -> SourceNode:
        config = self.shape.config
        memory, layout = self._memory(peer, config.local_slots), self.layouts[peer.instance]
        made = self.machines.source_node
        node = made(self.world, self.wire, peer, memory, self.shape.policy)
        node.on_look_up = partial(pulls.look_up, self, node)
        identity = Identity(peer, 1000 + self._lives, layout, MODEL, b"", TRANSPORTS)
        node.runner = self.machines.new_source(
            identity, config, Ports(node, node, node.peers, node)
        )
        return node

    def _target(self, peer: Peer) -> TargetNode:
        stranger = peer.instance == STRANGER
        layout = self.layouts["decode0" if stranger else peer.instance]
        staging, model = self.shape.staging, OTHER_MODEL if stranger else MODEL
        memory = self._memory(peer, staging.num_slots)
        # A stranger expects its own model at prefill, so only the handshake can refuse it.
        sources = [name for name in SOURCES if name in self.layouts]
        holders = {name: Instance(name, model, self.layouts[name]) for name in sources}
        node = TargetNode(self.world, self.wire, peer, memory, holders)
        identity = Identity(peer, 1000 + self._lives, layout, model, b"", TRANSPORTS)
        config, pools = self.shape.config, memory.pools
        node.runner = self.machines.new_target(
            identity, config, pools, staging, Ports(node, node, node.peers, node)
        )
        node.is_stranger = stranger
        node.on_failure = lambda room: self.cancel_room(peer.instance, room)
        return node

    def _beside(self, peer: Peer) -> Node | None:
        """Return the other endpoint of a peer's process."""
        name = SAME_PROCESS.get(peer.instance)
        return self.world.nodes.get(Peer(name, peer.rank)) if name else None

    def kill(self, node: Node, revive_after: float | None) -> None:
        """Kill a process and its endpoints. Half of the others get a hint of it after a while."""
        world = self.world
        world.counts["kill"] += 1
        world.record(node.peer, "!", "killed")
        node.process.alive = False
        self.wire.kill(node)
        beside = self._beside(node.peer)
        if beside is not None and beside.process.alive:
            self.kill(beside, revive_after)
        for other in self.nodes:
            if other is not node and world.rng.random() < 0.5:
                delay = 0.01 + world.rng.random() * 0.2
                world.at(delay, self._hint(other, node))
        if revive_after is not None:
            world.at(revive_after, lambda: self._revive(node))

    def leave(self, node: Node) -> None:
        """Close a process's endpoint, and kill the process a while later."""
        node.leave()
        self.world.at(1.0, lambda: self.kill(node, 0.05) if node.process.alive else None)

    def restart_doubted(self) -> None:
        """Kill each process that may still write quarantined memory, as an operator would."""
        for node in self.nodes:
            sessions = node.runner.sessions.records.values()
            for record in [one for one in sessions if one.doubtful]:
                other = self.world.nodes[record.peer]
                if other.process.alive and other.incarnation == record.incarnation:
                    self.kill(other, 0.05)

    def _hint(self, other: Node, dead: Node) -> Callable[[], None]:
        """Return an action that tells a node of a death: a hint, and no proof."""

        def hint() -> None:
            if other.process.is_serving:
                other.runner.probe_links(lambda link: link.peer == dead.peer)

        return hint

    def _revive(self, node: Node) -> None:
        if self.world.nodes[node.peer] is node:
            again = self.boot(node.peer)
            if node.peer.instance in SOURCES:
                self._announce_restart(again)

    def _announce_restart(self, source: Node) -> None:
        """Tell targets of a source's new incarnation, as discovery does; some late, some never."""
        news = PeerRestarted(source.peer, source.incarnation)
        for other in self.nodes:
            if other.peer.instance not in SOURCES and self.world.rng.random() < 0.7:
                self.world.at(self.world.rng.random() * 0.2, partial(other.deliver, news))

    # ------------------------------------------------------------ jobs

    def draw_job(
        self,
        *,
        decode: str | None = None,
        cached: bool = True,
        deadline_s: float | None = None,
        probe: bool = False,
    ) -> SimJob:
        """Draw a request of a few tokens in chunks; decode may have a prefix of it already."""
        world, rng = self.world, self.world.rng
        number = len(self.jobs)
        tokens = rng.randint(1, 12)
        prefix = rng.choice([0, 0, rng.randint(0, tokens), tokens]) if cached else 0
        cuts = sorted(rng.sample(range(1, tokens), min(tokens - 1, rng.randint(0, 2))))
        edges = [0, *cuts, tokens]
        chunks = [Span(a, b) for a, b in itertools.pairwise(edges)]
        # A generator of its own, so that the pushes do not change what else is drawn.
        push_rng = random.Random(f"{world.seed} {number}")
        short = world.inject("short_deadline")
        job = SimJob(
            room=number if number % 2 else f"room-{number}",
            number=number,
            request=Request(tokens, prefix),
            pushes=draw_pushes(push_rng, chunks, self.shape.spec.num_layers),
            decode=decode or rng.choice(list(self.decodes)),
            deadline_s=0.15 if short else deadline_s or 1.5 + rng.random() * 2,
            metadata=f"token {number}".encode(),
            probe=probe,
        )
        self.jobs.append(job)
        return job

    def start(self, job: SimJob) -> None:
        """Start a job at every rank of both engines, in any order."""
        if job.chain is not None:
            pulls.start_pull(self, job)
            return
        rng = self.world.rng
        late = rng.random() * 1.0 if self.world.inject("late_decode") else 0.0
        one_sided = self.world.inject("one_sided")
        missing = rng.choice([PREFILL, job.decode])
        wanted = self._with_same_room(job) if self.world.inject("mixed_up") else job
        for node in self.nodes:
            if node.peer.instance not in (PREFILL, job.decode):
                continue
            if one_sided and node.peer.instance == missing:
                continue
            is_source = node.peer.instance == PREFILL
            delay = rng.random() * 0.02 + (0.0 if is_source else late)
            self.world.at(delay, partial(node.start, job if is_source else wanted))

    def decline_one(self) -> SimJob:
        """Start a job that decode declines, before or after prefill opens its room."""
        job, rng = self.draw_job(deadline_s=5.0, probe=True), self.world.rng
        asked_first = rng.random() < 0.5
        for node in self.nodes:
            if node.peer.instance == PREFILL:
                self.world.at(rng.random() * 0.05, partial(node.start, job))
            elif isinstance(node, TargetNode) and node.peer.instance == job.decode:
                self.world.at(rng.random() * 0.05, partial(node.decline, job, asked_first))
        return job

    def _with_same_room(self, job: SimJob) -> SimJob:
        """Return another request of the same length that was given the same room."""
        number = job.number + MIXED_UP
        return replace(job, number=number, metadata=f"token {number}".encode())

    def cancel_room(self, instance: str, room: Room) -> None:
        """Cancel a room at every rank of an instance, as an engine does when one rank failed."""
        for node in self.nodes:
            if node.peer.instance == instance:
                self.world.at(0.01, partial(node.deliver, Cancel(room)))

    def is_done(self, job: SimJob) -> bool:
        """Return whether every rank that takes part reports the job done."""
        return not self.failures(job)

    def failures(self, job: SimJob) -> list[str]:
        """Return the outcome at each rank where a job is not done.

        A holder takes part in a pull only if it holds something.
        """
        sides = (job.decode,) if job.chain is not None else (PREFILL, job.decode)
        outcomes = {
            node.peer: node.outcomes.get(job.room)
            for node in self.nodes
            if node.peer.instance in sides
        }
        return [f"{peer}: {end}" for peer, end in outcomes.items() if not isinstance(end, Done)]
