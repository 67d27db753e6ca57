"""A process of the conformance suite: it owns transports and does as it is told.

Started as ``python -m kvferry.testing.transports TRANSPORT DEVICE FD...`` by
``process``. Every FD is one end of a connection and gets a thread with a ``Host``
of its own, so that several transports can be at work in one process. A request
is the name of a method with its arguments, a reply its result or its error.
Between requests the transport is polled as an endpoint would poll it: all the
time if it needs that, otherwise when it has called ``on_completion``. It can also be told to rest:
then it answers, and does not poll.
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
from kvferry.regions import Device
from kvferry.testing.transports.bindings import copy_by_memmove, pattern
from kvferry.testing.transports.memory import GpuMemory, HostMemory, RegionMemory
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup, WriteEnded
from kvferry.transports.registry import transport_class

PACE_S = 0.001


class HostWrite(NamedTuple):
    """One write: into which connection, its number, and what."""

    remote: int
    op: int
    binding: Binding


class TransportLife:
    """One transport from its making to its end, with its memory and connections."""

    def __init__(self, transport: Transport, memory: Sequence[RegionMemory]) -> None:
        self.transport = transport
        self._memory = memory
        self._remotes: list[RemoteMemory] = []
        self._writes: dict[Op, HostWrite] = {}
        # Writes that were made at once and go on.
        self._begun: list[Op] = []
        self._told: list[WriteEnded] = []
        self._is_resting = False
        self._news = threading.Event()
        transport.on_completion = self._news.set

    def register(self, *, writable: bool) -> bytes:
        """Give the transport its regions; its metadata."""
        self.transport.register([memory.region for memory in self._memory], writable=writable)
        return self.transport.metadata()

    def realm(self) -> str:
        """The transport's realm."""
        return self.transport.realm

    def fill(self, seed: int) -> None:
        """Give every region a pattern: that of ``seed``, of ``seed + 1``, and so on."""
        for index, memory in enumerate(self._memory):
            memory.write(pattern(seed + index, memory.region.num_bytes))

    def read(self) -> list[bytes]:
        """All the memory, margins included."""
        return [memory.read() for memory in self._memory]

    def peek(self, region: int, offset: int, length: int) -> bytes:
        """A few bytes of a region."""
        return self._memory[region].peek(offset, length)

    def connect(self, metadata: bytes) -> int:
        """Connect; the number by which writes name the connection."""
        self._remotes.append(self.transport.connect(metadata))
        return len(self._remotes) - 1

    def disconnect(self, remote: int) -> None:
        """Forget a peer."""
        self.transport.disconnect(self._remotes[remote])

    def write(self, writes: Sequence[HostWrite]) -> None:
        """Start these writes."""
        for write in writes:
            self._submit(write)

    def _submit(self, write: HostWrite) -> None:
        op = Op(write.op)
        self._writes[op] = write
        self.transport.write(self._remotes[write.remote], op, write.binding)

    def write_now(
        self, shares: Sequence[Sequence[HostWrite]], meanwhile: Sequence[HostWrite]
    ) -> list[WriteEnded]:
        """Make these writes at once, each share on a thread of its own; how they ended.

        This thread, the transport's own, starts others ``meanwhile`` and polls.
        """
        with ThreadPoolExecutor(len(shares)) as threads:
            begun = [threads.submit(self._written_now, share) for share in shares]
            self.write(meanwhile)
            while not all(share.done() for share in begun):
                self.idle()
        return [ended for share in begun for ended in share.result()]

    def _written_now(self, writes: Sequence[HostWrite]) -> list[WriteEnded]:
        """Again and again where the transport is busy; what goes on is told by ``wait``."""
        told = []
        for one in writes:
            ended = self._write_now(one)
            while ended is not None and ended.fate is WriteFate.BUSY:
                time.sleep(PACE_S)
                ended = self._write_now(one)
            if ended is None:
                self._begun.append(Op(one.op))
            else:
                told.append(ended)
        return told

    def _write_now(self, one: HostWrite) -> WriteEnded | None:
        return self.transport.write_now(self._remotes[one.remote], Op(one.op), one.binding)

    def wait(self, num_ended: int, limit_s: float) -> list[WriteEnded]:
        """What has ended and was not told yet, once it is that much or the time is up."""
        deadline = time.monotonic() + limit_s
        while len(self._told) < num_ended and time.monotonic() < deadline:
            self._news.wait(PACE_S)
            self.idle()
        told, self._told = self._told, []
        return told

    def rest(self, resting: bool) -> None:
        """Poll no more, or again."""
        self._is_resting = resting

    def idle(self) -> None:
        """Poll if an endpoint would."""
        if self._is_resting:
            return
        for op in list(self._begun):
            ended = self.transport.check_write(op)
            if ended is not None:
                self._begun.remove(op)
                self._told.append(ended)
        if not (self.transport.needs_polling or self._news.is_set()):
            return
        self._news.clear()
        for ended in self.transport.poll():
            if ended.fate is WriteFate.BUSY:
                self._submit(self._writes[ended.op])
            else:
                self._told.append(ended)


class Host:
    """What one connection can ask for: a transport's life, one after another."""

    def __init__(self, transport: str, device: Device) -> None:
        self._class = transport_class(transport)
        self._device = device
        self._life: TransportLife | None = None
        # The last life's memory, which a peer may still be writing to.
        self._past: TransportLife | None = None

    def open_target(
        self, agent: str, options: Mapping[str, str], sizes: Sequence[int], margin: int
    ) -> bytes:
        """Make a transport whose peers may write regions of these sizes; its metadata.

        Every region has a margin on both sides that nobody may touch.
        """
        transport = self._made(agent, options)
        if self._device.is_host:
            arrays = [transport.allocate(size + 2 * margin) for size in sizes]
            self._life = TransportLife(transport, [HostMemory(array, margin) for array in arrays])
        else:
            memory = [GpuMemory(self._device, size, margin) for size in sizes]
            self._life = TransportLife(transport, memory)
        return self._life.register(writable=True)

    def open_source(self, agent: str, options: Mapping[str, str], sizes: Sequence[int]) -> bytes:
        """Make a transport that is not written to, over memory that it did not make."""
        transport = self._made(agent, options)
        memory: Sequence[RegionMemory]
        if self._device.is_host:
            memory = [HostMemory(np.zeros(size, dtype=np.uint8), 0) for size in sizes]
        else:
            memory = [GpuMemory(self._device, size, 0) for size in sizes]
        self._life = TransportLife(transport, memory)
        return self._life.register(writable=False)

    def _made(self, agent: str, options: Mapping[str, str]) -> Transport:
        assert self._life is None, "close comes first"
        return self._class(
            TransportSetup(agent=agent, copy=copy_by_memmove, copies_on=copier_on, options=options)
        )

    def close(self) -> list[WriteEnded]:
        """End the life; what was polled and not asked for."""
        if self._life is None:
            return []
        life, self._life = self._life, None
        self._past = life
        life.idle()
        life.transport.close()
        life.transport.close()
        return life.wait(0, 0)

    def idle(self) -> None:
        """Poll if an endpoint would."""
        if self._life is not None:
            self._life.idle()

    def answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Do what was asked: whether it could be done, and its result or error."""
        who = self if hasattr(self, name) else self._life
        try:
            return True, getattr(who, name)(*arguments)
        except TransportError as error:
            return False, str(error)
        except Exception:
            # Ends this thread: whoever asked shows what was printed.
            traceback.print_exc()
            raise


def serve(transport: str, device: Device, descriptor: int) -> None:
    """Do what is asked over one connection until it is closed."""
    host = Host(transport, device)
    with Connection(descriptor) as connection:
        while True:
            try:
                while not connection.poll(PACE_S):
                    host.idle()
                name, arguments = connection.recv()
            except EOFError:
                break
            connection.send(host.answer(name, arguments))
            host.idle()  # Also while questions follow each other without a pause.
    host.close()


def main() -> None:
    """One thread for every connection named on the command line."""
    faulthandler.enable()
    # Whoever waits for us in vain can see where we are.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    transport, device = sys.argv[1], Device.parse(sys.argv[2])
    descriptors = [int(word) for word in sys.argv[3:]]
    with ThreadPoolExecutor(len(descriptors)) as threads:
        served = [threads.submit(serve, transport, device, each) for each in descriptors]
    for each in served:
        each.result()
