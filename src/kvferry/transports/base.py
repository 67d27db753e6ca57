"""What a transport is: one endpoint's means of writing into its peers' memory.

A transport belongs to one thread, which calls everything here but ``missing`` and what is
for writes that are made at once (``prebind``, ``write_now``, ``look``). It knows regions and
bytes, never rooms, credits or plans, and tells the target nothing: that something has
arrived, the endpoint says itself once the write has ended. Foreign exceptions end here:
set-up errors leave as ``TransportError``, and what becomes of a write is told once, as an
``WriteEnded``: by ``poll``, or to whoever made it at once.

The promise behind ``WriteEnded``, on which every arrival note and every release of memory rests:

- ``fate`` None: the bytes are in the target's memory, where whoever is told of it by any
  other way will find them, and ours is no longer read.
- BUSY: never submitted; nothing was written and nothing will be.
- FAILED: over. Some bytes may have been written; none will be, and ours is no
  longer read.
- UNKNOWN: it may still read our memory and write theirs. This is not said again;
  only the end of the peer's process settles it.

A write that can still go on is not ended, however long it takes. ``write`` may
take as long as its bytes need, but never waits for a peer that is stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Device, Region

# Copies a binding's bytes: (binding, addresses of source regions, of target regions).
Copy = Callable[[Binding, Sequence[int], Sequence[int]], None]


class DeviceEvent(Protocol):
    """The end of a copy. Both raise where the GPU has failed, after which nothing runs on it."""

    def query(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> None:
        """Wait for it, on any thread, using no core."""


class DeviceCopier(Protocol):
    """Copies between addresses on one GPU, in the order in which they were started."""

    def prepare(self, binding: Binding, sources: tuple[int, ...], targets: tuple[int, ...]) -> Any:
        """Everything about a copy but its start."""

    def start(self, prepared: Any) -> DeviceEvent:
        """Queue a copy, once."""

    def forget(self, prepared: Any) -> None:
        """It will not be started."""

    def drain(self) -> None:
        """Wait until nothing that was started still runs, also not what failed to start."""


def _no_devices(device: Device) -> DeviceCopier:
    raise TransportError(f"this TransportSetup has no copies on {device}; give it copies_on")


class TransportSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every transport is made from.

    ``agent`` is unique to one life of one endpoint. ``copy`` is for host memory, and
    ``copies_on`` makes what copies on a GPU. ``host`` is the address that peers reach
    this machine by. ``options`` are the transport's own.
    """

    agent: str
    copy: Copy
    copies_on: Callable[[Device], DeviceCopier] = _no_devices
    host: str = "127.0.0.1"
    options: Mapping[str, str] = {}


class RemoteMemory:
    """A connected peer's memory. What is inside is the transport's own affair."""


class WriteEnded(NamedTuple):
    """A write has ended, or nobody can say whether it has."""

    op: Op
    fate: WriteFate | None
    detail: str = ""


class Transport(ABC):
    """Registered memory, connected peers, and writes under way."""

    name: ClassVar[str]
    # The options that it knows.
    option_names: ClassVar[tuple[str, ...]] = ()
    # It lets whoever reaches this host read or write, also where ``host`` is loopback.
    listens_everywhere: ClassVar[bool] = False
    # The source copies straight into the target's mapped memory: nothing to stage.
    maps_peer: ClassVar[bool] = False
    # ``write_now`` may be called: a small write costs less than handing it to another thread.
    writes_at_once: ClassVar[bool] = False
    # ``write_now`` only begins a write, however large it is: something else than a core copies.
    writes_elsewhere: ClassVar[bool] = False
    # ``poll`` makes things happen, so it must be called while anything is expected: our own
    # writes, or those of peers into our memory. Without it, ``on_news`` is called when there
    # is something to poll for.
    needs_polling: ClassVar[bool] = False

    def __init__(self, setup: TransportSetup) -> None:
        self.setup = setup
        self.regions: tuple[Region, ...] = ()
        # May be called from any thread.
        self.on_news: Callable[[], None] = lambda: None

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What to install before this can be used, in one sentence; None if it is ready."""

    @property
    def realm(self) -> str:
        """Peers whose realms differ can never reach each other. Told in the greeting."""
        return self.name

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory, zeroed and page-aligned, that peers can be let write into."""
        page = 4096
        raw = np.zeros(num_bytes + page, dtype=np.uint8)
        skip = -raw.ctypes.data % page
        return raw[skip : skip + num_bytes]

    def adopt(self, arrays: Iterable[Any]) -> None:  # noqa: B027 - most take memory as it is
        """Make an engine's own arrays fit to be written by peers, in place, before ``register``.

        Their contents stay, their addresses may change.
        """

    @abstractmethod
    def register(self, regions: Sequence[Region], *, writable: bool) -> None:
        """Take this endpoint's memory, once; peers may write it if ``writable``.

        Raises ``TransportError`` where the memory can't be used, with the remedy.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs in order to write here."""

    @abstractmethod
    def connect(self, metadata: bytes) -> RemoteMemory:
        """Reach a peer's memory. Raises ``TransportError``, also for garbage."""

    @abstractmethod
    def write(self, remote: RemoteMemory, op: Op, pieces: Binding) -> None:
        """Start a write from our regions into the peer's. ``poll`` tells how it ended.

        A piece outside a region of either side is FAILED before anything is written.
        """

    def prebind(self, remote: RemoteMemory, pieces: Binding) -> None:  # noqa: B027 - most need no time
        """This very binding may be written at once soon: work out what can be.

        By whoever calls ``write_now``. What is wrong with it is told when it is written.
        """

    def write_now(self, remote: RemoteMemory, op: Op, pieces: Binding) -> WriteEnded | None:
        """Write here and now, and say how it ended; None: it goes on, and ``look`` will tell.

        BUSY: nothing was submitted, because the transport's own thread is at work; let it do
        this one too. May be called on any thread, also while the transport's own thread is
        inside any other method, but not for a remote that is being disconnected, as all are
        by ``close``. ``poll`` tells nothing of it. Bounds are those of ``write``.
        """
        raise TransportError("this transport does not write at once")

    def look(self, op: Op) -> WriteEnded | None:
        """How a write that ``write_now`` has begun ended, once; None: it goes on.

        On any thread, as ``write_now``. Never waits for others.
        """
        raise TransportError("this transport does not write at once")

    @abstractmethod
    def poll(self) -> list[WriteEnded]:
        """What has ended since the last call. Never waits."""

    @abstractmethod
    def disconnect(self, remote: RemoteMemory) -> None:
        """Forget a peer. Its writes have ended, or are of unknown fate."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, also with work in flight. Idempotent."""
