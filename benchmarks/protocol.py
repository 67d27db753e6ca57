"""Cost of the protocol without any transport, in microseconds per room.

    .venv/bin/python benchmarks/protocol.py

One source and one target machine, connected by the real codec, carry many small rooms at once.
Every room must end Done on both sides, and every table must be empty afterwards. The last line is
JSON.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

from kvferry.config import ProtocolConfig
from kvferry.ids import Peer
from kvferry.layout import Layout, Span, attention
from kvferry.plan import Request, contiguous_pools
from kvferry.protocol.codec import decode, encode
from kvferry.protocol.events import (
    Choose,
    Chosen,
    Connect,
    Event,
    Finish,
    Instance,
    MemoryReached,
    Open,
    Push,
    Receive,
    Received,
    ReceiveRequest,
    Report,
    Send,
    Write,
    WriteEnded,
)
from kvferry.protocol.links import Identity
from kvferry.protocol.machine import Machine
from kvferry.protocol.messages import (
    Envelope,
    PageTableMessage,
    Staging,
    TransportOffer,
    TransportOffers,
)
from kvferry.protocol.outcome import Done
from kvferry.protocol.source import SourceMachine
from kvferry.protocol.target import TargetMachine

SOURCE, TARGET = Peer("prefill", 0), Peer("decode", 0)


class Pair:
    """Two machines, and the frames between them in order."""

    def __init__(self) -> None:
        layout = Layout(attention(layers=16, kv_heads=8, head_dim=128))
        config = ProtocolConfig()
        pools = contiguous_pools(layout, 0, num_pages=1 << 16).map
        self.prefill = Instance(SOURCE.instance, "model", layout)
        self.source = SourceMachine(_identity(SOURCE, 1, layout), config)
        self.target = TargetMachine(_identity(TARGET, 2, layout), config, pools, Staging())
        self.machines: dict[Peer, Machine] = {SOURCE: self.source, TARGET: self.target}
        self.pending: deque[tuple[Peer, Event]] = deque()
        self.steps = 0
        self.done = 0

    def handle(self, peer: Peer, event: Event) -> None:
        """Let a machine handle an event, and queue the events that follow."""
        self.steps += 1
        for action in self.machines[peer].handle(event, 1.0):
            match action:
                case Send(peer=to, envelope=envelope):
                    self.pending.append((to, Received(_encoded_and_decoded(envelope))))
                case Connect(session=session) if peer == SOURCE:
                    self.pending.append((peer, MemoryReached(session, "here")))
                case Choose(ticket=ticket, blocks=blocks):
                    self.pending.append((peer, Chosen(ticket, (False,) * len(blocks))))
                case Write(op=op, transfer=transfer, note=note):
                    self.pending.append((transfer.peer, Received(_encoded_and_decoded(note))))
                    self.pending.append((peer, WriteEnded(op)))
                case Report(outcome=Done()):
                    self.done += 1
                case _:
                    pass

    def settle(self) -> None:
        """Deliver every queued event."""
        while self.pending:
            self.handle(*self.pending.popleft())


def _identity(peer: Peer, incarnation: int, layout: Layout) -> Identity:
    transports = TransportOffers((TransportOffer("here", "this process"),))
    return Identity(peer, incarnation, layout, "model", b"", transports)


def _encoded_and_decoded(envelope: Envelope) -> Envelope:
    message = decode(encode(envelope))
    assert isinstance(message, Envelope)
    return message


def case(concurrency: int, rooms: int) -> dict[str, Any]:
    """Carry rooms, ``concurrency`` at a time."""
    pair = Pair()
    begin = time.perf_counter()
    for first in range(0, rooms, concurrency):
        batch = range(first, first + concurrency)
        for room in batch:
            pair.handle(SOURCE, Open(room, 60.0))
            tables = (PageTableMessage("kv", (room % (1 << 16),)),)
            pair.handle(
                TARGET, Receive(pair.prefill, ReceiveRequest(room, Request(16), tables, 60.0))
            )
        pair.settle()
        for room in batch:
            pair.handle(SOURCE, Push(room, Span(0, 16)))
            pair.handle(SOURCE, Finish(room, 16, b"token"))
        pair.settle()
    seconds = time.perf_counter() - begin
    if (
        pair.done != 2 * rooms
        or pair.source.rooms
        or pair.target.rooms
        or pair.source.inflight.writes
    ):
        raise SystemExit("not every room was done")
    row = {
        "concurrency": concurrency,
        "rooms": rooms,
        "us_per_room": round(seconds / rooms * 1e6, 1),
        "us_per_step": round(seconds / pair.steps * 1e6, 2),
    }
    print(f"{concurrency:6} rooms at once: {row['us_per_room']:7} µs a room, both sides and codec")
    return row


def main() -> None:
    print(json.dumps({"rooms": [case(c, n) for c, n in ((1, 2000), (64, 6400), (1024, 8192))]}))


if __name__ == "__main__":
    main()
