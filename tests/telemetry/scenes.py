"""Scenes for the page: a discovery service that is told views as endpoints would tell them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from discovery.parts import ask, registration

from kvferry.discovery.records import RankRecord
from kvferry.layout import Layout, Parallel, attention
from kvferry.telemetry.clocks import Offset
from kvferry.telemetry.reports import (
    EndpointView,
    FailureView,
    LinkView,
    ModeBytes,
    ReportRequest,
    RoomView,
)
from kvferry.telemetry.steps import Moment, RoomTrace, TraceStep

SPEC = attention(layers=32, kv_heads=8, head_dim=128)


class Scene:
    """Endpoints that are not there: a side is a name and its number of ranks."""

    def __init__(self, url: str, sources: dict[str, int], targets: dict[str, int]) -> None:
        self.url = url
        self.sources, self.targets = sources, targets
        self.began = time.monotonic()
        self.dead: set[str] = set()
        self.flows = False
        self.failures: tuple[FailureView, ...] = ()
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
        """Everybody who lives tells how they are."""
        for role, sides in (("source", self.sources), ("target", self.targets)):
            for name, num in sides.items():
                for rank in range(num):
                    if f"{name}/{rank}" not in self.dead:
                        self._tell(self.view(role, name, rank, num))

    def _tell(self, view: EndpointView) -> None:
        mode = f"/v1/instances/{view.instance}/ranks/{view.rank}/view"
        answer = ask(self.url, "PUT", mode, msgspec.json.encode(view))
        wishes = msgspec.json.decode(answer.body, type=ReportRequest)
        if wishes.rooms or wishes.layout:
            sides = self.sources | self.targets
            layout = self.layout(sides[view.instance]) if wishes.layout else None
            traces = tuple(self.trace(view, room) for room in wishes.rooms)
            self._tell(msgspec.structs.replace(view, layout=layout, traces=traces))

    def view(self, role: str, name: str, rank: int, num: int) -> EndpointView:
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
                "rooms": tuple(self._room(i, now) for i in range(num_open)),
                "slow": tuple(self._slow(i) for i in range(6)),
            }
        return EndpointView(
            instance=name,
            rank=rank,
            role=role,
            incarnation=1,
            clock=now,
            wall=time.time(),
            transport="nixl",
            sharding=str(self.layout(num)),
            num_ranks=num,
            pages=4096,
            staging_bytes=64 << 20,
            links=tuple(links),
            failures=self.failures if role == "target" else (),
            **busy,
        )

    def _link(self, role: str, name: str, rank: int, peer: str, now: float) -> LinkView:
        state = "lost" if peer in self.dead else "up"
        flow = 120e6 * (1 + (len(name) + rank + len(peer)) % 4)
        num_bytes = int(flow * (now - self.began)) if self.flows and state == "up" else 0
        mode = ModeBytes("staged" if rank % 2 else "slices", num_bytes)
        sent = (mode,) if role == "source" and num_bytes else ()
        return LinkView(
            peer=peer, state=state, transport="nixl", sent=sent, offset=Offset(0.0, 0.0002, now)
        )

    def _room(self, i: int, now: float) -> RoomView:
        status = ("moving", "waiting", "connecting")[i % 3]
        room = str(7131865401186524032 + 977 * i)
        return RoomView(room=room, status=status, begun=now - i, seconds=0.04 + 0.4 * i)

    def _slow(self, i: int) -> RoomView:
        room, request = str(4131865401186524032 + 977 * i), f"req-{i:04x}"
        return RoomView(
            room=room, status="ended", begun=0.0, seconds=4.2 / (i + 1), request=request
        )

    def trace(self, view: EndpointView, room: str) -> RoomTrace:
        t = view.clock - 10
        steps: tuple[TraceStep, ...] = (TraceStep(Moment.ASKED, t),)
        ends = (TraceStep(Moment.CLOSED, t + 0.305, "prefill-0/0", True),)
        if view.role == "source":
            peers = [link.peer for link in view.links[:4]]
            steps = (
                TraceStep(Moment.OPENED, t + 0.004),
                *(TraceStep(Moment.OFFERED, t + 0.006, peer, True) for peer in peers),
                *(TraceStep(Moment.PUSHED, t + 0.06 * i) for i in range(1, 5)),
                TraceStep(Moment.FINISHED, t + 0.241),
            )
            for i, peer in enumerate(peers):
                at = t + 0.07 + 0.045 * i + 0.01 * view.rank
                steps += (
                    TraceStep(Moment.GATHERED, at, peer, False, 0.012, 8 << 20, "staged"),
                    TraceStep(Moment.WRITTEN, at + 0.04, peer, False, 0.04, 8 << 20, "staged"),
                )
            ends = (TraceStep(Moment.CLOSED, t + 0.3, peers[0]),)
        else:
            at = t + 0.29 + 0.004 * view.rank
            scatter = TraceStep(Moment.SCATTERED, at, "prefill-0/0", False, 0.02)
            steps += (TraceStep(Moment.ARRIVED, t + 0.26, "prefill-0/0", True), scatter)
        done = TraceStep(Moment.DONE, t + 0.32)
        return RoomTrace(view.name, view.role, room, (*steps, *ends, done), "req-0001")


def failure(room: str, ago_s: float, code: str, reason: str) -> FailureView:
    at = time.monotonic() - ago_s
    return FailureView(room=room, at=at, code=code, reason=reason, request="req-51f0c2")


def failures() -> tuple[FailureView, ...]:
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
