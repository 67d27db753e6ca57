"""Jobs: one write, or one scatter, that the threads of an endpoint pass on and complete.

A job belongs to the thread that holds it, and to nobody else: the owner makes it, the copier
fills its slot, the transport_thread or the owner has it written, and the owner hears how it went.
Of a
gather that is made ahead the owner may note where it goes while the copier still has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.ids import Op, Session
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import Base
from kvferry.protocol.events import Gather, Scatter, Write, WriteFate
from kvferry.transports.base import Transport, WriteEnded

# Largest write that the owner thread makes itself: some 50 µs.
AT_ONCE_BYTES, AT_ONCE_PIECES = 128 << 10, 64


def _bound() -> Binding:
    raise AssertionError("a direct write fills no slot")


@dataclass(slots=True, eq=False)
class WriteJob:
    """One write, from its submission to its result."""

    action: Write | Gather
    # Bytes to write. Of a write through a slot: once the slot is filled, and its target known.
    binding: Binding = Binding(())  # noqa: RUF009 - immutable
    # Of one through a slot: what fills it, from pages into the slot, at those addresses.
    bind: Callable[[], Binding] = _bound
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    # Our slot, and the target's. The owner's alone: ``there`` and ``discarded`` of one ahead.
    here: Base | None = None
    there: Base | None = None
    discarded: bool = False
    filled: bool = False
    # When its gather was asked for, until that was told.
    asked: float | None = None
    # Its size and its result.
    mode: TransferMode = TransferMode.SLICES
    transport: str = ""
    started: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0
    is_over: bool = False
    fate: WriteFate | None = None
    detail: str = ""

    @property
    def op(self) -> Op:
        """Its number."""
        return self.action.op

    @property
    def session(self) -> Session:
        """In which it is written."""
        return self.action.transfer.session

    @property
    def is_ahead(self) -> bool:
        """Whether its slot is filled before it is known where that goes."""
        return isinstance(self.action, Gather)

    def fill(self, gathered: Binding) -> None:
        """Its slot is filled. The owner hears of it before it goes on, if it was made ahead."""
        self.num_bytes = gathered.num_bytes
        if not self.is_ahead:
            self.aim()

    def aim(self) -> None:
        """Write what is in the slot, in one piece."""
        assert self.here is not None
        assert self.there is not None
        self.binding = Binding.bulk(self.here, self.there, self.num_bytes)

    def is_small(self) -> bool:
        """Whether the owner may make it itself, by a core."""
        self.num_bytes, self.num_pieces = self.binding.size
        return self.num_bytes <= AT_ONCE_BYTES and self.num_pieces <= AT_ONCE_PIECES

    def start(self, transport: Transport) -> Binding:
        """It begins now; what that transport is to write."""
        binding, self.transport = self.binding, transport.name
        if self.here is None and not transport.maps_peer:
            binding = binding.merged()
        self.started = time.monotonic()
        return binding

    def describe(self, written: Binding) -> None:
        """Work out what it is, which may take as long as starting it."""
        if written is not self.binding or not self.num_pieces:
            self.num_bytes, self.num_pieces = written.size
        if self.here is None:
            self.mode = TransferMode.RUNS if self.binding.contiguous else TransferMode.SLICES

    def end(self, ended: WriteEnded) -> None:
        """The transport says how it went."""
        self.is_over, self.fate, self.detail = True, ended.fate, ended.detail
        self.seconds = time.monotonic() - self.started

    def fail(self, detail: str) -> None:
        """It is over before it began."""
        self.is_over, self.fate, self.detail = True, WriteFate.FAILED, detail


@dataclass(slots=True, eq=False)
class ScatterJob:
    """One copy of a slot into its pages. ``at_leisure``: what the owner can do when none runs."""

    action: Scatter
    bind: Callable[[], Binding]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    at_leisure: Callable[[], None] | None = None
    begun: float = field(default_factory=time.monotonic)
    problem: str = ""

    @property
    def op(self) -> Op:
        """Its number."""
        return self.action.op

    def fail(self, detail: str) -> None:
        """It is over, and touches nothing any more."""
        self.problem = detail


# Jobs of a copier. A gather is the first part of a write.
CopyJob = WriteJob | ScatterJob
