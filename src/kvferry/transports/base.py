"""The transport interface: how one endpoint writes into the memory of its peers.

A transport belongs to one thread. That thread calls every method except ``missing`` and the
methods for immediate writes (``prebind``, ``write_now``, ``check_write``). A transport knows
regions and bytes; rooms, credits and plans are above it. It does not notify the target: the
endpoint sends a message once the write has completed.

Exceptions of foreign libraries end here. Set-up errors are raised as ``TransportError``; each
write's result is reported exactly once, as a ``WriteEnded``, by ``poll`` or by the methods for
immediate writes.

Arrival messages and every release of memory rely on what ``WriteEnded.fate`` promises:

- None: the bytes are in the target's memory and visible to a target that is notified over any
  other channel. The source memory is no longer read.
- BUSY: never submitted. Nothing was written and nothing will be.
- FAILED: ended. Some bytes may have been written, but no more will be, and the source memory is
  no longer read.
- UNKNOWN: the write may still read the source memory and write the target's. There will be no
  further report; only the end of the peer's process settles it.

A write that may still make progress has not ended, however long it takes. ``write`` may take as
long as its bytes need, but never waits for a peer that is stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteEnded as WriteEnded  # noqa: PLC0414 - a result of this interface
from kvferry.regions import Device, Region

# Copies a binding's bytes: (binding, addresses of source regions, of target regions).
Copy = Callable[[Binding, Sequence[int], Sequence[int]], None]

_PAGE_BYTES = 4096


class DeviceEvent(Protocol):
    """Completion of a copy on a GPU. Both methods raise if the GPU has failed for good."""

    def query(self) -> bool:
        """Return whether the copy has completed."""

    def synchronize(self) -> None:
        """Block the calling thread, without spinning, until the copy has completed."""


class DeviceCopier(Protocol):
    """Copies between addresses on one GPU, in the order in which copies are started."""

    def prepare(self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]) -> Any:
        """Do all the work of a copy except its launch, and return it for ``start``."""

    def start(self, prepared: Any) -> DeviceEvent:
        """Launch a prepared copy. Each can be started once."""

    def forget(self, prepared: Any) -> None:
        """Release a prepared copy that will not be started."""

    def drain(self) -> None:
        """Wait for every launched copy, including one whose launch failed half-way."""


def _no_devices(device: Device) -> DeviceCopier:
    raise TransportError(f"this TransportSetup cannot copy on {device}; set copies_on")


class TransportSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments that every transport is constructed from.

    ``agent`` is unique to one incarnation of one endpoint. ``copy`` copies in host memory, and
    ``copies_on`` makes the copier of a GPU. ``host`` is the address at which peers reach this
    machine. ``options`` are specific to the transport.
    """

    agent: str
    copy: Copy
    copies_on: Callable[[Device], DeviceCopier] = _no_devices
    host: str = "127.0.0.1"
    options: Mapping[str, str] = {}

    def resolve_options(self, transport: str, defaults: Mapping[str, str]) -> dict[str, str]:
        """Return the options, completed with ``defaults``. Raises for an unknown name."""
        unknown = sorted(set(self.options) - set(defaults))
        if unknown:
            known = f"it has {', '.join(defaults) or 'none'}"
            raise TransportError(f"the {transport} transport has no option {unknown[0]!r}; {known}")
        return {**defaults, **self.options}


class RemoteMemory:
    """Handle of a connected peer's memory. Its contents are private to the transport."""


class Transport(ABC):
    """Registered memory, connected peers and writes in flight."""

    name: ClassVar[str]
    # Names of the options that the transport accepts.
    option_names: ClassVar[tuple[str, ...]] = ()
    # Anybody who reaches this host can read or write, even if ``host`` is a loopback address.
    listens_on_all_addresses: ClassVar[bool] = False
    # The source copies straight into the target's mapped memory, so staging is not needed.
    maps_peer: ClassVar[bool] = False
    # ``write_now`` may be called: a small write costs less than handing it to another thread.
    supports_write_now: ClassVar[bool] = False
    # ``write_now`` only launches a write, whatever its size; a device does the copying.
    write_now_is_async: ClassVar[bool] = False
    # ``poll`` drives progress, so it must be called while a write in either direction is
    # expected. Otherwise ``on_completion`` is called when ``poll`` has something to return.
    needs_polling: ClassVar[bool] = False

    def __init__(self, setup: TransportSetup) -> None:
        self.setup = setup
        self.regions: tuple[Region, ...] = ()
        # May be called from any thread.
        self.on_completion: Callable[[], None] = lambda: None
        # The last ``poll`` stopped because of its time limit: poll again without a pause.
        self.poll_again = False

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return what must be installed first, in one sentence; None if the transport is usable."""

    @property
    def realm(self) -> str:
        """Reachability domain, sent in the handshake. Only peers of the same realm can connect."""
        return self.name

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed, page-aligned host memory that can be registered as writable."""
        raw = np.zeros(num_bytes + _PAGE_BYTES, dtype=np.uint8)
        skip = -raw.ctypes.data % _PAGE_BYTES
        return raw[skip : skip + num_bytes]

    def adopt(self, arrays: Iterable[Any]) -> None:  # noqa: B027 - optional
        """Make an engine's own arrays writable by peers, in place. Call before ``register``.

        The contents are kept; the addresses may change.
        """

    @abstractmethod
    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Register this endpoint's memory. Called once. Peers may write it if ``writable``.

        Raises ``TransportError`` with a remedy if the memory cannot be used.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Return what a peer needs in order to connect."""

    @abstractmethod
    def connect(self, metadata: bytes) -> RemoteMemory:
        """Connect to a peer. Raises ``TransportError``, also for malformed metadata."""

    @abstractmethod
    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Start a write from the local regions into the peer's; ``poll`` returns its result.

        If any piece is outside a region of either side, the write is FAILED and writes nothing.
        """

    def prebind(self, remote: RemoteMemory, pieces: Binding) -> None:  # noqa: B027 - optional
        """Prepare for a ``write_now`` of this same binding object.

        Called by the thread that calls ``write_now``. Errors are reported by the write.
        """

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Write on the calling thread and return the result; None while it is in flight.

        The result of a write in flight is returned by ``check_write``, not by ``poll``. BUSY
        means that the transport's own thread is using the transport; hand it this write too.

        May be called on any thread, even while the transport's thread is inside another method,
        but not for a remote that is being disconnected. ``close`` disconnects all of them. The
        bounds are checked as by ``write``.
        """
        raise TransportError(f"the {self.name} transport has no immediate writes; use write()")

    def check_write(self, op: Op) -> WriteEnded | None:
        """Return the result of a write that ``write_now`` left in flight, once; None until then.

        May be called on any thread, as ``write_now``. Never blocks on another thread's work.
        """
        raise TransportError(f"the {self.name} transport has no immediate writes; use write()")

    @abstractmethod
    def poll(self) -> list[WriteEnded]:
        """Return the results of writes that ended since the last call. Never blocks."""

    @abstractmethod
    def disconnect(self, remote: RemoteMemory) -> None:
        """Forget a peer. A write still in flight ends as UNKNOWN, or with its real result later."""

    @abstractmethod
    def close(self) -> None:
        """Release every resource, even with writes in flight. Idempotent."""
