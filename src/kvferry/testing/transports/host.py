"""A process of the conformance suite: it owns transports and serves a test's requests.

``process`` starts it as ``python -m kvferry.testing.transports TRANSPORT DEVICE FD...``. Each FD is
one end of a connection and gets a thread with its own ``Host``, so that one process can have
several transports. A request is a method's name with its arguments, a reply its result or error.

Between requests the transport is polled as an endpoint polls it: all the time if it needs that,
otherwise after it has called ``on_completion``. A resting host serves requests and does not poll.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.memory.copy.devices import copier_on
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Device, Region
from kvferry.testing.transports.bindings import Bytes, copy_by_memmove, pattern
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.registry import transport_class

POLL_S = 0.001


class HostWrite(NamedTuple):
    """One write: the number of its connection, its own number, and its binding."""

    remote: int
    op: int
    binding: Binding


# ---------------------------------------------------------------- memory


class RegionMemory:
    """A region with a margin on both sides that nobody may write, in host or GPU memory.

    ``whole`` is a NumPy array or a torch tensor of bytes.
    """

    def __init__(self, whole: Any, margin: int, device: Device) -> None:
        self._whole = whole
        self._inner = whole[margin : len(whole) - margin]
        self._is_host = device.is_host
        address = self._inner.ctypes.data if device.is_host else self._inner.data_ptr()
        self.region = Region(address, len(self._inner), device)

    def write(self, values: Bytes) -> None:
        """Fill the region."""
        if self._is_host:
            self._inner[:] = values
        else:
            import torch  # noqa: PLC0415 - only where there is a GPU

            self._inner.copy_(torch.from_numpy(values))
            torch.cuda.synchronize()

    def read(self) -> bytes:
        """Return the region with its margins."""
        return self._bytes(self._whole)

    def peek(self, offset: int, length: int) -> bytes:
        """Return some bytes of the region."""
        return self._bytes(self._inner[offset : offset + length])

    def _bytes(self, values: Any) -> bytes:
        return bytes((values if self._is_host else values.cpu().numpy()).tobytes())


def zeros_on(device: Device, num_bytes: int) -> Any:
    """Return zeroed bytes on a GPU."""
    import torch  # noqa: PLC0415 - only where there is a GPU

    zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=str(device))
    torch.cuda.synchronize()
    return zeros


# ---------------------------------------------------------------- transports


class OpenTransport:
    """One transport with its memory, connections and writes."""

    def __init__(self, transport: Transport, memory: Sequence[RegionMemory]) -> None:
        self.transport = transport
        self._memory = memory
        self._remotes: list[RemoteMemory] = []
        self._writes: dict[Op, HostWrite] = {}
        # Immediate writes that have not ended yet.
        self._pending: list[Op] = []
        self._ended: list[WriteEnded] = []
        self._is_resting = False
        self._news = threading.Event()
        transport.on_completion = self._news.set

    def register(self, *, writable: bool) -> bytes:
        """Register the regions, and return the transport's metadata."""
        self.transport.register([memory.region for memory in self._memory], writable=writable)
        return self.transport.metadata()

    def realm(self) -> str:
        """Return the transport's realm."""
        return self.transport.realm

    def fill(self, seed: int) -> None:
        """Fill the regions with the patterns of ``seed``, ``seed + 1`` and so on."""
        for index, memory in enumerate(self._memory):
            memory.write(pattern(seed + index, memory.region.num_bytes))

    def read(self) -> list[bytes]:
        """Return all regions with their margins."""
        return [memory.read() for memory in self._memory]

    def peek(self, region: int, offset: int, length: int) -> bytes:
        """Return some bytes of a region."""
        return self._memory[region].peek(offset, length)

    def connect(self, metadata: bytes) -> int:
        """Connect to a peer, and return the connection's number."""
        self._remotes.append(self.transport.connect(metadata))
        return len(self._remotes) - 1

    def disconnect(self, remote: int) -> None:
        """Disconnect from a peer."""
        self.transport.disconnect(self._remotes[remote])

    def write(self, writes: Sequence[HostWrite]) -> None:
        """Submit these writes."""
        for write in writes:
            self._submit(write)

    def _submit(self, write: HostWrite) -> None:
        op = Op(write.op)
        self._writes[op] = write
        self.transport.write(self._remotes[write.remote], op, write.binding)

    def write_now(
        self, shares: Sequence[Sequence[HostWrite]], meanwhile: Sequence[HostWrite]
    ) -> list[WriteEnded]:
        """Make immediate writes, each share on a thread of its own; return those that ended.

        This thread, which is the transport's own, submits the writes ``meanwhile`` and polls.
        """
        with ThreadPoolExecutor(len(shares)) as threads:
            begun = [threads.submit(self._write_share, share) for share in shares]
            self.write(meanwhile)
            while not all(share.done() for share in begun):
                self.poll()
        return [ended for share in begun for ended in share.result()]

    def _write_share(self, writes: Sequence[HostWrite]) -> list[WriteEnded]:
        """Make immediate writes, again while the transport is busy."""
        ended = []
        for one in writes:
            what = self._remotes[one.remote], Op(one.op), one.binding
            result = self.transport.write_now(*what)
            while result is not None and result.fate is WriteFate.BUSY:
                time.sleep(POLL_S)
                result = self.transport.write_now(*what)
            if result is None:
                self._pending.append(Op(one.op))
            else:
                ended.append(result)
        return ended

    def wait(self, num_ended: int, limit_s: float) -> list[WriteEnded]:
        """Wait until that many writes have ended or the time is up; return those that ended."""
        deadline = time.monotonic() + limit_s
        while len(self._ended) < num_ended and time.monotonic() < deadline:
            self._news.wait(POLL_S)
            self.poll()
        ended, self._ended = self._ended, []
        return ended

    def rest(self, resting: bool) -> None:
        """Stop polling, or start again."""
        self._is_resting = resting

    def poll(self) -> None:
        """Check writes and poll the transport as an endpoint's thread does."""
        if self._is_resting:
            return
        for op in list(self._pending):
            result = self.transport.check_write(op)
            if result is not None:
                self._pending.remove(op)
                self._ended.append(result)
        if not (self.transport.needs_polling or self._news.is_set()):
            return
        self._news.clear()
        for ended in self.transport.poll():
            if ended.fate is WriteFate.BUSY:
                self._submit(self._writes[ended.op])
            else:
                self._ended.append(ended)


class Host:
    """The requests of one connection: transports, one after another."""

    def __init__(self, transport: str, device: Device) -> None:
        self._class = transport_class(transport)
        self._device = device
        self._open: OpenTransport | None = None
        # The last transport's memory, which a peer may still be writing to.
        self._closed: OpenTransport | None = None

    def open(
        self,
        agent: str,
        options: Mapping[str, str],
        sizes: Sequence[int],
        margin: int,
        writable: bool,
    ) -> bytes:
        """Open a transport with regions of these sizes; return its metadata.

        Regions that peers may write come from the transport's ``allocate``.
        """
        assert self._open is None, "close the transport first"
        setup = TransportSetup(
            agent=agent, copy=copy_by_memmove, copies_on=copier_on, options=options
        )
        transport, device = self._class(setup), self._device
        memory = []
        for size in sizes:
            num_bytes = size + 2 * margin
            if not device.is_host:
                whole = zeros_on(device, num_bytes)
            elif writable:
                whole = transport.allocate(num_bytes)
            else:
                whole = np.zeros(num_bytes, dtype=np.uint8)
            memory.append(RegionMemory(whole, margin, device))
        self._open = OpenTransport(transport, memory)
        return self._open.register(writable=writable)

    def close(self) -> list[WriteEnded]:
        """Close the transport twice; return the ended writes that nobody waited for."""
        if self._open is None:
            return []
        closed, self._open = self._open, None
        self._closed = closed
        closed.poll()
        closed.transport.close()
        closed.transport.close()
        return closed.wait(0, 0)

    def poll(self) -> None:
        """Check writes and poll the transport as an endpoint's thread does."""
        if self._open is not None:
            self._open.poll()

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Serve a request: return whether it succeeded, and its result or error."""
        who = self if hasattr(self, name) else self._open
        try:
            return True, getattr(who, name)(*arguments)
        except TransportError as error:
            return False, str(error)
        except Exception:
            # This ends the thread, and the test shows what the process has printed.
            traceback.print_exc()
            raise


def serve(transport: str, device: Device, descriptor: int) -> None:
    """Serve the requests of one connection until it is closed."""
    host = Host(transport, device)
    with Connection(descriptor) as connection:
        while True:
            try:
                while not connection.poll(POLL_S):
                    host.poll()
                name, arguments = connection.recv()
            except EOFError:
                break
            connection.send(host.answer(name, arguments))
            host.poll()  # Even if requests follow each other without a pause.
    host.close()


def main() -> None:
    """Serve every connection of the command line on a thread of its own."""
    faulthandler.enable()
    # A test that waits in vain asks for the stacks.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    transport, device = sys.argv[1], Device.parse(sys.argv[2])
    descriptors = [int(word) for word in sys.argv[3:]]
    with ThreadPoolExecutor(len(descriptors)) as threads:
        served = [threads.submit(serve, transport, device, each) for each in descriptors]
    for each in served:
        each.result()
