"""kvferry's NIXL transport beside NIXL's own calls: the same pages, in turns, in two processes.

    .venv/bin/python benchmarks/nixl_pages.py                     268 MB in host memory
    .venv/bin/python benchmarks/nixl_pages.py --device cuda --tensors 128 --page-kib 128 --pages 128

The peers call NIXL as SGLang's manager does: descriptor lists of whole pools are prepared once
(``prep_xfer_dlist``), and each write posts indices of pages (``make_prepped_xfer``). ``lists`` has
one thread, and ``lists-8`` has SGLang's eight (``num_threads``), among which NIXL divides writes of
1024 descriptors or more. Pages are in random order on both sides, or consecutive with ``--order
contiguous``. ``split_ms`` is the part of kvferry's time for listing descriptors. Bytes
are compared after the first write of each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.ids import Op
from kvferry.memory.staging.buffers import Buffer, allocate
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.regions import Device, Region
from kvferry.testing.transports import copy_by_memmove
from kvferry.transports.base import TransportSetup
from kvferry.transports.nixl import NixlTransport, package
from kvferry.transports.nixl.batches import NixlMemory, make_batches, memory_type

POLL_S = 50e-6
LISTS = {"lists": 0, "lists-8": 8}


class Shape(NamedTuple):
    """The pools of either side. ``pages`` of the ``pool_pages`` of each tensor are sent."""

    device: Device
    tensors: int
    pages: int
    page_bytes: int

    @property
    def pool_pages(self) -> int:
        return 2 * self.pages

    @property
    def tensor_bytes(self) -> int:
        return self.pool_pages * self.page_bytes

    def allocate(self, seed: int | None) -> Buffer:
        """Return the memory of all tensors, of random bytes or zeroed."""
        num_bytes = self.tensors * self.tensor_bytes
        buffer = allocate(num_bytes, self.device)
        if seed is None:
            buffer.owner[:] = 0  # type: ignore[index]
        else:
            self.fill(buffer, np.random.default_rng(seed).bytes(num_bytes))
        return buffer

    def fill(self, buffer: Buffer, content: bytes) -> None:
        owner: Any = buffer.owner
        given = np.frombuffer(content, dtype=np.uint8)
        if self.device.is_host:
            owner[:] = given
        else:
            import torch  # noqa: PLC0415 - only a GPU needs it

            owner.copy_(torch.from_numpy(given.copy()))

    def content(self, buffer: Buffer) -> NDArray[np.uint8]:
        """Return the bytes as ``[tensor, page, byte]``."""
        owner: Any = buffer.owner
        flat: NDArray[np.uint8] = owner if self.device.is_host else owner.cpu().numpy()
        return flat.reshape(self.tensors, self.pool_pages, self.page_bytes)

    def regions(self, buffer: Buffer) -> list[Region]:
        first, size = buffer.region.address, self.tensor_bytes
        return [Region(first + i * size, size, self.device) for i in range(self.tensors)]


def digest(content: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(content.data).digest()


class RawAgent:
    """NIXL's own calls, after SGLang's pattern."""

    def __init__(self, shape: Shape, buffer: Buffer, threads: int, name: str) -> None:
        module = package.load()
        sync = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = module.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        self.shape = shape
        self.agent = module.nixl_agent(f"{name}-{threads}-{os.getpid()}", config)
        self.agent.create_backend("UCX", {"num_threads": str(threads)} if threads else {})
        self.type = memory_type(shape.device)
        rows = [(at.address, at.num_bytes, at.device.number, "") for at in shape.regions(buffer)]
        self.agent.register_memory(rows, self.type)
        self.peer = ""
        self.ours: Any = None
        self.theirs: Any = None

    def connect(self, metadata: bytes, source: Buffer, target_address: int) -> None:
        self.peer = self.agent.add_remote_agent(metadata).decode()
        self.ours = self._prepared("", source.region.address)
        self.theirs = self._prepared(self.peer, target_address)

    def _prepared(self, agent: str, address: int) -> Any:
        count, size, device = self.shape.pool_pages, self.shape.page_bytes, self.shape.device.number
        starts = address + np.arange(self.shape.tensors * count, dtype=np.uint64) * np.uint64(size)
        table = np.stack([starts, np.full_like(starts, size), np.full_like(starts, device)], axis=1)
        return self.agent.prep_xfer_dlist(agent, table, self.type)

    def write(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        tensors = np.arange(self.shape.tensors, dtype=np.int64)[:, None] * self.shape.pool_pages
        ours, theirs = ((tensors + pages).astype(np.int32).ravel() for pages in (source, target))
        handle = self.agent.make_prepped_xfer("WRITE", self.ours, ours, self.theirs, theirs)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()


class OwnAgent:
    """kvferry's transport."""

    def __init__(self, shape: Shape, buffer: Buffer, *, writable: bool) -> None:
        self.shape = shape
        setup = TransportSetup(agent=f"kvferry-{os.getpid()}", copy=copy_by_memmove)
        self.transport = NixlTransport(setup)
        self.transport.register(shape.regions(buffer), writable=writable)
        self.remote: Any = None
        self.op = 0

    def binding(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> Binding:
        size, one = self.shape.page_bytes, np.ones(len(source), dtype=np.int64)
        columns = source * size, target * size, one * size, one, one
        pieces = Pieces(*columns, Stride(0, 0), Stride(0, 0), whole_pages=True)
        bases = tuple(Base(index, index, 0) for index in range(self.shape.tensors))
        return Binding((BindingPart("kv", "k", bases, bases, pieces),))

    def write(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self.op += 1
        self.transport.write(self.remote, Op(self.op), self.binding(source, target))
        while not (ended := self.transport.poll()):
            pass
        assert ended[0].fate is None, ended


def target(connection: Connection, shape: Shape) -> None:
    """Poll every agent, and send a digest of the memory when asked."""
    buffer = shape.allocate(None)
    own = OwnAgent(shape, buffer, writable=True)
    raw = {name: RawAgent(shape, buffer, 0, f"target-{name}") for name in LISTS}
    metadata = {name: each.agent.get_agent_metadata() for name, each in raw.items()}
    connection.send((own.transport.metadata(), metadata, buffer.region.address))
    while True:
        own.transport.poll()
        for each in raw.values():
            each.agent.get_new_notifs()
        time.sleep(POLL_S)
        if connection.poll():
            if connection.recv() == "end":
                break
            connection.send(digest(shape.content(buffer)))
            buffer.owner[:] = 0  # type: ignore[index]
            connection.send("cleared")
    os._exit(0)


def measure(shape: Shape, order: str, repeats: int) -> dict[str, Any]:
    context = get_context("spawn")
    pipe, target_end = context.Pipe()
    process = context.Process(target=target, args=(target_end, shape), daemon=True)
    process.start()
    buffer = shape.allocate(1)
    own = OwnAgent(shape, buffer, writable=False)
    raw = {name: RawAgent(shape, buffer, threads, "source") for name, threads in LISTS.items()}
    own_metadata, raw_metadata, address = pipe.recv()
    own.remote = own.transport.connect(own_metadata)
    for name, each in raw.items():
        each.connect(raw_metadata[name], buffer, address)
    rng = np.random.default_rng(2)

    def pages() -> NDArray[np.int64]:
        chosen = rng.permutation(shape.pool_pages)[: shape.pages]
        return chosen if order == "fragmented" else np.arange(shape.pages)

    writers: dict[str, OwnAgent | RawAgent] = {"kvferry": own, **raw}
    expected = np.zeros_like(shape.content(buffer))
    for name, writer in writers.items():
        source, into = pages(), pages()
        writer.write(source, into)
        expected[:] = 0
        expected[:, into] = shape.content(buffer)[:, source]
        pipe.send("digest")
        assert pipe.recv() == digest(expected), f"{name} has written other bytes"
        assert pipe.recv() == "cleared"
    times: dict[str, list[float]] = {name: [] for name in writers}
    cpu: dict[str, list[float]] = {name: [] for name in writers}
    splits: list[float] = []
    memory = NixlMemory(shape.regions(buffer))
    for number in range(repeats):
        turns = [*writers.items()]
        for name, writer in (turns[(number + i) % len(turns)] for i in range(len(turns))):
            source, into = pages(), pages()
            began, used = time.perf_counter(), time.process_time()
            writer.write(source, into)
            times[name].append(1e3 * (time.perf_counter() - began))
            cpu[name].append(1e3 * (time.process_time() - used))
        began = time.perf_counter()
        make_batches(own.binding(source, into), memory, memory)
        splits.append(1e3 * (time.perf_counter() - began))
    pipe.send("end")
    process.join(10)
    return {
        "mb": shape.tensors * shape.pages * shape.page_bytes / 1e6,
        "order": order,
        "descriptors": own.binding(pages(), pages()).merged().num_pieces,
        **{
            f"{name}_ms": {
                "median": round(statistics.median(values), 2),
                "least": round(min(values), 2),
                "cpu": round(statistics.median(cpu[name]), 2),
            }
            for name, values in times.items()
        },
        "split_ms": round(statistics.median(splits), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    sizes = {"tensors": 32, "pages": 256, "page-kib": 32, "repeats": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--order", choices=("fragmented", "contiguous"), default="fragmented")
    args = parser.parse_args()
    shape = Shape(Device.parse(args.device), args.tensors, args.pages, args.page_kib << 10)
    print(json.dumps(measure(shape, args.order, args.repeats)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # NIXL takes long to close agents that have peers.
    os._exit(0)
