"""Simulated endpoints that report to a real discovery service, for tests of the page."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from discovery.parts import ask, registration

from kvferry.discovery.records import RankRecord
from kvferry.layout import Layout, Parallel, attention
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.status import (
    EndpointStatus,
    FailureStatus,
    LinkStatus,
    ReportRequest,
    RoomStatus,
)
from kvferry.telemetry.steps import RoomTrace, StepKind, TraceStep

SPEC = attention(layers=32, kv_heads=8, head_dim=128)


class Scene:
    """Endpoints that do not exist: each side maps a name to its number of ranks."""

    def __init__(self, url: str, sources: dict[str, int], targets: dict[str, int]) -> None:
        self.url = url
        self.sources, self.targets = sources, targets
        self.began = time.monotonic()
        self.dead: set[str] = set()
        self.flows = False
        self.failures: tuple[FailureStatus, ...] = ()
        for name, num in sources.items():
            for rank in range(num):
                self._register(name, rank, num)

    def layout(self, num: int) -> Layout:
        return Layout(SPEC, Parallel(tp=num), page_tokens=16)

    def _register(self, name: str, rank: int, num: int) -> None:
        record = RankRecord(
            instance=name,
            rank=rank,
            incarnation=1,
            fingerprint="llama-3.1-8b",
            layout=self.layout(num),
            transport="nixl",
            control="tcp://10.0.0.2:5000",
        )
        mode = f"/v1/instances/{name}/ranks/{rank}"
        assert ask(self.url, "PUT", mode, registration(record, 300.0)).status == 204

    def tell(self) -> None:
        """Send a report of every endpoint that is not dead."""
        for role, sides in (("source", self.sources), ("target", self.targets)):
            for name, num in sides.items():
                for rank in range(num):
                    if f"{name}/{rank}" not in self.dead:
                        self._tell(self.view(role, name, rank, num))

    def _tell(self, view: EndpointStatus) -> None:
        mode = f"/v1/instances/{view.instance}/ranks/{view.rank}/view"
        answer = ask(self.url, "PUT", mode, msgspec.json.encode(view))
        wishes = msgspec.json.decode(answer.body, type=ReportRequest)
        if wishes.rooms:
            traces = tuple(self.trace(view, room) for room in wishes.rooms)
            self._tell(msgspec.structs.replace(view, traces=traces))

    def view(self, role: str, name: str, rank: int, num: int) -> EndpointStatus:
        now = time.monotonic()
        peers = self.targets if role == "source" else self.sources
        links = [
            self._link(role, name, rank, f"{peer}/{i}", now)
            for peer, count in peers.items()
            for i in range(count)
        ]
        busy: dict[str, Any] = {}
        if self.flows:
            num_open = 3 + rank % 3
            busy = {
                "num_open": num_open,
                "num_done": int(40 * (now - self.began)),
                "pages_held": 900 + 217 * ((rank * 7 + len(name)) % 9),
                "staging_used_bytes": (8 << 20) * (1 + rank % 5),
                "rooms": tuple(self._room(i, f"{name}/{rank}") for i in range(num_open)),
                "slow": tuple(self._slow(i, f"{name}/{rank}") for i in range(6)),
            }
        return EndpointStatus(
            instance=name,
            rank=rank,
            role=role,
            incarnation=1,
            clock=now,
            wall=time.time(),
            transport="nixl",
            layout=self.layout(num),
            pages=4096,
            staging_bytes=64 << 20,
            links=tuple(links),
            bytes_per_s=sum(link.bytes_per_s for link in links),
            failures=self.failures if role == "target" else (),
            **busy,
        )

    def _link(self, role: str, name: str, rank: int, peer: str, now: float) -> LinkStatus:
        state = "lost" if peer in self.dead else "up"
        flow = 120e6 * (1 + (len(name) + rank + len(peer)) % 4)
        flows = self.flows and state == "up" and role == "source"
        ends = (f"{name}/{rank}", peer)
        source, target = ends if role == "source" else reversed(ends)
        return LinkStatus(
            source=source,
            target=target,
            state=state,
            transport="nixl",
            mode=("staged" if rank % 2 else "slices") if flows else "",
            bytes_per_s=flow if flows else 0.0,
            num_bytes=int(flow * (now - self.began)) if flows else 0,
            offset=Offset(0.0, 0.0002, now),
        )

    def _room(self, i: int, endpoint: str) -> RoomStatus:
        status = ("moving", "waiting", "connecting")[i % 3]
        room = str(7131865401186524032 + 977 * i)
        return RoomStatus(room=room, status=status, seconds=0.04 + 0.4 * i, endpoints=(endpoint,))

    def _slow(self, i: int, endpoint: str) -> RoomStatus:
        room, request = str(4131865401186524032 + 977 * i), f"req-{i:04x}"
        seconds, endpoints = 4.2 / (i + 1), (endpoint,)
        return RoomStatus(
            room=room, status="ended", seconds=seconds, endpoints=endpoints, request=request
        )

    def trace(self, view: EndpointStatus, room: str) -> RoomTrace:
        t = view.clock - 10
        steps: tuple[TraceStep, ...] = (TraceStep(StepKind.ASKED, t),)
        ends = (TraceStep(StepKind.CLOSED, t + 0.305, "prefill-0/0"),)
        if view.role == "source":
            peers = [link.target for link in view.links[:4]]
            steps = (
                TraceStep(StepKind.OPENED, t + 0.004),
                *(TraceStep(StepKind.OFFERED, t + 0.006, peer) for peer in peers),
                *(TraceStep(StepKind.PUSHED, t + 0.06 * i) for i in range(1, 5)),
                TraceStep(StepKind.FINISHED, t + 0.241),
            )
            for i, peer in enumerate(peers):
                at = t + 0.07 + 0.045 * i + 0.01 * view.rank
                steps += (
                    TraceStep(StepKind.GATHERED, at, peer, 0.012, 8 << 20, "staged"),
                    TraceStep(StepKind.WRITTEN, at + 0.04, peer, 0.04, 8 << 20, "staged"),
                )
            ends = (TraceStep(StepKind.CLOSED, t + 0.3, peers[0]),)
        else:
            at = t + 0.29 + 0.004 * view.rank
            scatter = TraceStep(StepKind.SCATTERED, at, "prefill-0/0", 0.02)
            steps += (TraceStep(StepKind.ARRIVED, t + 0.26, "prefill-0/0"), scatter)
        done = TraceStep(StepKind.DONE, t + 0.32)
        return RoomTrace(view.name, view.role, room, (*steps, *ends, done), "req-0001")


def failure(room: str, ago_s: float, code: str, reason: str) -> FailureStatus:
    return FailureStatus(
        room=room, endpoint="d", ago_s=ago_s, code=code, reason=reason, request="req-51f0c2"
    )


def failures() -> tuple[FailureStatus, ...]:
    return (
        failure("4131865401186529917", 8, "peer-gone", "lost prefill-1/2: its process is gone"),
        failure(
            "9131865401186521133",
            71,
            "deadline",
            "still waiting for prefill-0/1 (accepted); "
            "no life here of the transport thread for 6 s",
        ),
        failure("6131865401186520042", 340, "aborted", "given up at decode"),
    )
