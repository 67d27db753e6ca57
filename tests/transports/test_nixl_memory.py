"""NIXL between torch tensors on the host and on a GPU."""

from __future__ import annotations

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvferry.ids import Op
from kvferry.regions import Device, Region
from kvferry.testing.transports import PlacedPiece, binding_of, copy_by_memmove
from kvferry.transports.base import TransportSetup, WriteEnded
from kvferry.transports.nixl import NixlTransport

torch = pytest.importorskip("torch")
NUM_BYTES = 1 << 20
PIECES = binding_of(PlacedPiece(at, NUM_BYTES - 1000 - at, 777) for at in range(0, 512_000, 1000))


def tensor(device: str, first: int) -> Any:
    """Distinguishable bytes."""
    return (torch.arange(NUM_BYTES, device=device) * 7 + first).to(torch.uint8)


def opened(agent: str, device: str, memory: Any, *, writable: bool) -> NixlTransport:
    transport = NixlTransport(TransportSetup(agent=agent, copy=copy_by_memmove))
    region = Region(memory.data_ptr(), NUM_BYTES, Device.parse(device))
    transport.register([region], writable=writable)
    return transport


def target(connection: Connection, device: str) -> None:
    """Poll, and send the memory's contents on request."""
    memory = tensor(device, 0)
    transport = opened("target", device, memory, writable=True)
    connection.send(transport.metadata())
    while True:
        while not connection.poll(0.001):
            transport.poll()
        if connection.recv() == "end":
            break
        connection.send(bytes(memory.cpu().numpy()))
    transport.close()


def device_or_skip(name: str) -> str:
    if name != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    return name


@pytest.mark.parametrize("ours", ["cpu", "cuda:0"])
@pytest.mark.parametrize("theirs", ["cpu", "cuda:0"])
def test_write_between_memory_types(ours: str, theirs: str) -> None:
    if NixlTransport.missing():
        pytest.skip(str(NixlTransport.missing()))
    device_or_skip(ours)
    device_or_skip(theirs)
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, theirs), daemon=True)
    process.start()
    there.close()
    memory = tensor(ours, 3)
    source = opened("source", ours, memory, writable=False)
    try:
        assert here.poll(60), "the target does not start"
        source.write(source.connect(here.recv()), Op(1), PIECES)
        ended: list[WriteEnded] = []
        deadline = time.monotonic() + 30
        while not ended:
            assert time.monotonic() < deadline, "the write does not end"
            ended += source.poll()
        here.send("read")
        assert ended == [WriteEnded(Op(1))]
        assert here.poll(30), "the target does not answer"
        read = here.recv()
    finally:
        source.close()
        here.send("end")
        process.join(10)
    expected, sent = bytearray(tensor("cpu", 0).numpy()), bytes(memory.cpu().numpy())
    for at in range(0, 512_000, 1000):
        into = NUM_BYTES - 1000 - at
        expected[into : into + 777] = sent[at : at + 777]
    assert read == bytes(expected)
