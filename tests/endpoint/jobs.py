"""Sample jobs for tests of one part of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.endpoint.jobs import ScatterJob, WriteJob
from kvferry.ids import Generation, Op, Peer, Serial, Session, SlotIndex
from kvferry.layout import Layout, attention
from kvferry.layout.intervals import Span
from kvferry.plan import Block, Request, reshard
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import Base
from kvferry.protocol.events import Gather, Scatter, TransferRequest, Write, WriteFate
from kvferry.protocol.messages import Arrived, Envelope
from kvferry.transports.base import WriteEnded

ME, PEER = Peer("p", 0), Peer("d", 0)
SESSION = Session(1, 1)
LAYOUT = Layout(attention(layers=1, kv_heads=1, head_dim=1))
PLAN = reshard(LAYOUT, LAYOUT)
BLOCKS = (Block("kv", Span(0, 1), Span(0, 1)),)
HERE, THERE = Base(0, 0, 0), Base(0, 1, 4096)
NUM_BYTES = 100


def transfer(session: Session) -> TransferRequest:
    return TransferRequest("r", session, Generation(1), 0, PEER, PLAN, Request(1), ())


def write_action(op: int = 1, session: Session = SESSION) -> Write:
    note = Envelope(ME, 1, session, 0, Arrived("r", Generation(1), BLOCKS))
    return Write(Op(op), transfer(session), BLOCKS, note)


def gather_action(op: int = 1, session: Session = SESSION) -> Gather:
    return Gather(Op(op), transfer(session), BLOCKS, SlotIndex(1))


def direct(op: int, binding: Binding, session: Session = SESSION) -> WriteJob:
    """Return a direct write."""
    return WriteJob(write_action(op, session), binding)


def bulk() -> Binding:
    return Binding.bulk(HERE, THERE, NUM_BYTES)


def gather(op: int, bind: Callable[[], Binding] = bulk, *, early: bool = False) -> WriteJob:
    """Return a staged write; if ``early``, without its remote slot."""
    action: Any = gather_action(op) if early else write_action(op)
    job = WriteJob(action, bind=bind, sources=(0,), targets=(0, 0), mode=TransferMode.STAGED)
    job.local, job.remote = HERE, None if early else THERE
    return job


def scatter(
    op: int,
    bind: Callable[[], Binding] = bulk,
    when_idle: Callable[[], None] | None = None,
) -> ScatterJob:
    """Return a copy of a slot into pages."""
    about = Op(op), "r", PEER, PLAN, Request(1), BLOCKS, SlotIndex(0), Serial(1)
    return ScatterJob(Scatter(*about), bind, (0,), (0, 0), when_idle)


def over(
    mode: TransferMode, fate: WriteFate | None = None, num_bytes: int = 4096, seconds: float = 0.5
) -> WriteJob:
    """Return a write that has ended."""
    job = WriteJob(write_action(), mode=mode, num_bytes=num_bytes, num_pieces=2)
    job.end(WriteEnded(job.op, fate, "as told"))
    job.seconds = seconds
    return job
