"""Jobs: one write, scatter or proof, passed between the threads of an endpoint.

A job belongs to the thread that holds it. The loop makes it, the copier fills its slot, the
transport thread or the loop writes it, and the loop takes its result. One exception: the loop
may set ``remote`` and ``discarded`` of an early gather while the copier holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.ids import Op, Session
from kvferry.memory.checksum.devices import SumsInSteps
from kvferry.plan.bind import Binding
from kvferry.plan.choose import TransferMode
from kvferry.plan.places import Base
from kvferry.protocol.events import Gather, Prove, Scatter, Write, WriteFate
from kvferry.transports.base import Transport, WriteEnded

# Largest write that the loop makes itself with the CPU: some 50 µs.
INLINE_BYTES, INLINE_PIECES = 128 << 10, 64


def _no_gather() -> Binding:
    raise AssertionError("a direct write fills no slot")


@dataclass(slots=True, eq=False)
class WriteJob:
    """One write, from its submission to its result.

    A staged write gathers into the local slot first. An early gather (``is_early``) starts
    before the machine knows which remote slot it goes to.
    """

    action: Write | Gather
    # The bytes to write. Of a staged write: set when the slot is filled and ``remote`` is known.
    binding: Binding = Binding(())  # noqa: RUF009 - immutable
    # Staged only: the copy from pages into the slot, and the base addresses of both.
    bind: Callable[[], Binding] = _no_gather
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    # Staged only: the local and the remote slot.
    local: Base | None = None
    remote: Base | None = None
    discarded: bool = False
    filled: bool = False
    # When the gather was submitted; None once observers have seen it.
    gather_began: float | None = None
    # Size and result.
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
        """The operation's number."""
        return self.action.op

    @property
    def session(self) -> Session:
        """Session of the target that is written to."""
        return self.action.transfer.session

    @property
    def is_early(self) -> bool:
        """Whether the gather started before its remote slot was known."""
        return isinstance(self.action, Gather)

    def slot_filled(self, gathered: Binding) -> None:
        """Note that the local slot is filled, and bind the bulk write if its target is known."""
        self.num_bytes = gathered.num_bytes
        if not self.is_early:
            self.bind_bulk()

    def bind_bulk(self) -> None:
        """Bind one contiguous write from the local slot to the remote slot."""
        assert self.local is not None
        assert self.remote is not None
        self.binding = Binding.bulk(self.local, self.remote, self.num_bytes)

    def is_small(self) -> bool:
        """Return whether the loop may make this write itself with the CPU."""
        self.num_bytes, self.num_pieces = self.binding.size
        return self.num_bytes <= INLINE_BYTES and self.num_pieces <= INLINE_PIECES

    def start(self, transport: Transport) -> None:
        """Note the start time and the transport that is to write ``binding``."""
        self.transport = transport.name
        self.started = time.monotonic()

    def describe(self, transport: Transport) -> None:
        """Compute size and mode for observers. May take as long as starting the write did."""
        if self.local is None and not transport.maps_peer:
            # As the transport merges them.
            self.num_bytes, self.num_pieces = self.binding.merged().size
        elif not self.num_pieces:
            self.num_bytes, self.num_pieces = self.binding.size
        if self.local is None:
            self.mode = TransferMode.RUNS if self.binding.contiguous else TransferMode.SLICES

    def end(self, ended: WriteEnded) -> None:
        """Store the transport's result."""
        self.is_over, self.fate, self.detail = True, ended.fate, ended.detail
        self.seconds = time.monotonic() - self.started

    def fail(self, detail: str) -> None:
        """Store the failure of a write that was never started."""
        self.is_over, self.fate, self.detail = True, WriteFate.FAILED, detail


@dataclass(slots=True, eq=False)
class ScatterJob:
    """One copy of a slot into its pages. An idle GPU prepares the next one with ``when_idle``."""

    action: Scatter
    bind: Callable[[], Binding]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    when_idle: Callable[[], None] | None = None
    begun: float = field(default_factory=time.monotonic)
    problem: str = ""

    def fail(self, detail: str) -> None:
        """Store why the copy failed. It touches no memory any more."""
        self.problem = detail


@dataclass(slots=True, eq=False)
class ProofJob:
    """Sums of a room's pages, computed in steps so that copies can run in between."""

    action: Prove
    start: Callable[[], SumsInSteps]
    result: bytes | None = None
    problem: str = ""
    sums: SumsInSteps | None = None

    def step(self) -> bool:
        """Add some content. Return False if there is no more; ``finish`` follows."""
        if self.sums is None:
            self.sums = self.start()
        return self.sums.step()

    def finish(self) -> None:
        """Store the sums."""
        assert self.sums is not None
        self.result = self.sums.result

    def fail(self, detail: str) -> None:
        """Store why the sums can't be computed."""
        self.problem = detail


# Jobs of a copier. A gather is the first half of a staged write.
CopyJob = WriteJob | ScatterJob
