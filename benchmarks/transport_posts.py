"""Cost of a write over each transport: slots, bulk and many small pieces.

Two processes. The target polls every ``POLL_S``, as an endpoint might; every byte is compared at
the end. Immediate writes are timed too, where a transport has them. The last line is JSON.

    .venv/bin/python benchmarks/transport_posts.py [transport ...]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.ids import Op
from kvferry.plan.bind import Binding, BindingPart
from kvferry.plan.coalesce import Pieces, Stride
from kvferry.plan.places import Base
from kvferry.regions import Region
from kvferry.testing.transports import PlacedPiece, binding_of, copy_by_memmove
from kvferry.transports.base import RemoteMemory, Transport, TransportSetup
from kvferry.transports.registry import available, transport_class

Bytes = NDArray[np.uint8]
KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 256 * MIB
POLL_S = 50e-6


def pages(count: int, num_bytes: int) -> Binding:
    """Return pages in random order on both sides."""
    rng, one = np.random.default_rng(2), np.ones(count, dtype=np.int64)
    source, target = (rng.permutation(count) * num_bytes for _ in range(2))
    pieces = Pieces(source, target, one * num_bytes, one, one, Stride(0, 0), Stride(0, 0), True)
    return Binding((BindingPart("raw", "pages", (Base(0, 0, 0),), (Base(0, 0, 0),), pieces),))


CASES = {
    "slot 16 KiB": (binding_of([PlacedPiece(0, 0, 16 * KIB)]), 100),
    "slot 1 MiB": (binding_of([PlacedPiece(0, 0, MIB)]), 100),
    "slot 2 MiB": (binding_of([PlacedPiece(0, 0, 2 * MIB)]), 100),
    "slot 4 MiB": (binding_of([PlacedPiece(0, 0, 4 * MIB)]), 100),
    "bulk 64 MiB": (binding_of([PlacedPiece(0, 0, 64 * MIB)]), 7),
    "bulk 256 MiB": (binding_of([PlacedPiece(0, 0, 256 * MIB)]), 5),
    "8192 pages of 32 KiB": (pages(8192, 32 * KIB), 5),
    "16384 pieces of 1 KiB": (pages(16384, KIB), 5),
    "16384 pieces of 512 B": (pages(16384, 512), 5),
}


class Times(NamedTuple):
    """Seconds from the start of a write until it returned and until it ended."""

    returned: float
    ended: float


def target(connection: Connection, name: str) -> None:
    """Poll, and send the memory when asked."""
    transport = transport_class(name)(
        TransportSetup(agent=f"target-{os.getpid()}", copy=copy_by_memmove)
    )
    memory = transport.allocate(POOL_BYTES)
    transport.register([Region(memory.ctypes.data, memory.nbytes)], writable=True)
    connection.send(transport.metadata())
    while True:
        transport.poll()
        time.sleep(POLL_S)
        if connection.poll():
            if connection.recv() == "end":
                break
            connection.send(memory.tobytes())
    transport.close()


class Bench:
    """The source of the writes."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.memory = np.random.default_rng(1).integers(0, 256, POOL_BYTES, dtype=np.uint8)
        self.op = 0

    def write(self, remote: RemoteMemory, binding: Binding) -> Times:
        self.op += 1
        start = time.perf_counter()
        self.transport.write(remote, Op(self.op), binding)
        returned = time.perf_counter()
        return Times(returned - start, self._ended() - start)

    def write_now_s(self, remote: RemoteMemory, binding: Binding) -> float:
        start = time.perf_counter()
        self.op += 1
        ended = self.transport.write_now(remote, Op(self.op), binding)
        seconds = time.perf_counter() - start
        while ended is None:
            ended = self.transport.check_write(Op(self.op))
        assert ended.fate is None, ended
        return seconds

    def _ended(self) -> float:
        while True:
            for ended in self.transport.poll():
                assert ended.fate is None, ended
                return time.perf_counter()
            time.sleep(0)


def copy_expected(binding: Binding, source: Bytes, into: Bytes) -> None:
    pieces = binding.descriptors()
    rows = zip(pieces.source_offset, pieces.target_offset, pieces.length, strict=True)
    for at, to, length in rows:
        into[to : to + length] = source[at : at + length]


def memcpy_s(memory: Bytes, num_bytes: int) -> float:
    into = np.zeros(num_bytes, dtype=np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        into[:] = memory[:num_bytes]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str) -> dict[str, dict[str, float]]:
    context = get_context("spawn")
    pipe, target_end = context.Pipe()
    process = context.Process(target=target, args=(target_end, name), daemon=True)
    process.start()
    transport = transport_class(name)(
        TransportSetup(agent=f"source-{os.getpid()}", copy=copy_by_memmove)
    )
    bench = Bench(transport)
    transport.register([Region(bench.memory.ctypes.data, POOL_BYTES)], writable=False)
    remote = transport.connect(pipe.recv())
    expected = np.zeros(POOL_BYTES, dtype=np.uint8)
    results = {}
    first = bench.write(remote, binding_of([PlacedPiece(0, 0, KIB)]))
    results["first write"] = {"ended_us": first.ended * 1e6}
    for case, (binding, repeat) in CASES.items():
        times = [bench.write(remote, binding) for _ in range(repeat)]
        returned, ended = (statistics.median(column) for column in zip(*times, strict=True))
        copy_expected(binding, bench.memory, expected)
        results[case] = {
            "returned_us": returned * 1e6,
            "ended_us": ended * 1e6,
            "best_ended_us": min(one.ended for one in times) * 1e6,
            "gb_per_s": binding.num_bytes / ended / 1e9,
            "piece_us": ended / binding.num_pieces * 1e6,
            "memcpy_us": memcpy_s(bench.memory, binding.num_bytes) * 1e6,
        }
        if transport.supports_write_now:
            now = statistics.median(bench.write_now_s(remote, binding) for _ in range(repeat))
            results[case]["now_us"] = now * 1e6
        print(name, case, {key: round(value, 1) for key, value in results[case].items()})
    pipe.send("read")
    assert pipe.recv() == expected.tobytes(), "the target has other bytes than were sent"
    pipe.send("end")
    transport.close()
    process.join(10)
    return results


def main() -> None:
    names = sys.argv[1:] or [name for name, problem in available().items() if problem is None]
    print(json.dumps({name: measure(name) for name in names}))


if __name__ == "__main__":
    main()
