"""The shared-memory transport: conformance, segments and their removal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.errors import TransportError
from kvferry.ids import Op
from kvferry.plan.bind import Binding
from kvferry.protocol.events import WriteFate
from kvferry.regions import Device, Region
from kvferry.testing.transports import PlacedPiece, TransportSuite, binding_of, copy_by_memmove
from kvferry.transports import segments
from kvferry.transports.base import Copy, TransportSetup, WriteEnded
from kvferry.transports.segments import SharedFile
from kvferry.transports.shm import ShmTransport

PAGE = 4096
# The first lines of the scripts below.
PROLOGUE = """
    import os, signal, sys, time
    import msgspec
    from kvferry.regions import Region
    from kvferry.testing.transports import copy_by_memmove
    from kvferry.transports import segments
    from kvferry.transports.base import TransportSetup
    from kvferry.transports.shm import ShmTransport

    transport = ShmTransport(TransportSetup(agent="script", copy=copy_by_memmove))

    def registered(num_bytes):
        array = transport.allocate(num_bytes)
        transport.register([Region(array.ctypes.data, array.nbytes)], writable=True)
        return array

    def name_of(transport):
        return msgspec.msgpack.decode(transport.metadata())["segments"][0]
"""


class TestConformance(TransportSuite):
    transport = "shm"


def make(copy: Copy = copy_by_memmove) -> ShmTransport:
    return ShmTransport(TransportSetup(agent="test", copy=copy))


@pytest.fixture
def ours() -> Iterator[ShmTransport]:
    transport = make()
    yield transport
    transport.close()


@pytest.fixture
def theirs() -> Iterator[ShmTransport]:
    transport = make()
    yield transport
    transport.close()


def region_of(array: np.ndarray[Any, np.dtype[np.uint8]]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def names_of(transport: ShmTransport) -> list[str]:
    return list(msgspec.msgpack.decode(transport.metadata())["segments"])


def script(body: str, prologue: str = PROLOGUE) -> str:
    return textwrap.dedent(prologue) + textwrap.dedent(body)


def run(body: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python process in which warnings are errors."""
    command = [*before, sys.executable, "-W", "error", "-c", script(body)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def exists(name: str) -> bool:
    try:
        segments.attach(name, 0).close()
    except TransportError:
        return False
    return True


def kill_tree(pid: int, number: int) -> None:
    """Kill every descendant and then the process, as engines do."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    doomed = [pid]
    for each in doomed:
        doomed += [child for child, parent in parents.items() if parent == each]
    for each in reversed(doomed):
        os.kill(each, number)


def await_gone(name: str) -> None:
    deadline = time.monotonic() + 20
    while exists(name):
        assert time.monotonic() < deadline, f"{name} was left behind"
        time.sleep(0.01)


class TestMemory:
    @pytest.mark.parametrize("num_bytes", [0, 1, PAGE, 10 * PAGE + 1])
    def test_allocated_memory_is_zeroed_aligned_and_writable(
        self, ours: ShmTransport, num_bytes: int
    ) -> None:
        array = ours.allocate(num_bytes)
        assert array.shape == (num_bytes,)
        assert not array.any()
        assert array.ctypes.data % PAGE == 0
        array[:] = 7
        assert np.all(array == 7)

    def test_writable_memory_must_be_shared(self, ours: ShmTransport) -> None:
        with pytest.raises(TransportError, match=r"100 bytes is not in shared.*allocate\(\)"):
            ours.register([region_of(np.zeros(100, dtype=np.uint8))], writable=True)

    @pytest.mark.parametrize(("start", "num_bytes"), [(-1, 10), (PAGE - 9, 10), (0, PAGE + 1)])
    def test_a_region_must_lie_inside_a_segment(
        self, ours: ShmTransport, start: int, num_bytes: int
    ) -> None:
        address = ours.allocate(PAGE).ctypes.data
        with pytest.raises(TransportError, match="not in shared memory"):
            ours.register([Region(address + start, num_bytes)], writable=True)

    def test_torch_tensors_are_moved_with_their_views(
        self, ours: ShmTransport, theirs: ShmTransport
    ) -> None:
        cache = torch.arange(6 * PAGE, dtype=torch.int32)
        low, high = cache[: 2 * PAGE], cache[3 * PAGE :].view(3, PAGE)[:, 5:]
        theirs.adopt([low, high, np.zeros(3)])
        assert torch.equal(cache, torch.arange(6 * PAGE, dtype=torch.int32))
        address, num_bytes = low.data_ptr(), 4 * low.numel()
        theirs.register([Region(address, num_bytes), Region(high.data_ptr(), 4)], writable=True)
        assert len(names_of(theirs)) == 1
        values = np.array([7, 8], dtype=np.int32)
        ours.register([region_of(values.view(np.uint8))], writable=False)
        pieces = binding_of([PlacedPiece(0, 8, 4), PlacedPiece(4, 0, 4, 0, 1)])
        assert ours.write_now(ours.connect(theirs.metadata()), Op(1), pieces) == WriteEnded(
            Op(1), None
        )
        assert cache[[2, 3 * PAGE + 5]].tolist() == [7, 8]
        before = high.data_ptr()
        theirs.adopt([high])
        assert high.data_ptr() == before, "shared memory is not moved again"
        name = names_of(theirs)[0]
        theirs.close()
        assert not exists(name)

    def test_adjacent_mappings_of_a_file_are_joined(self) -> None:
        lines = [
            "7f0000000000-7f0000002000 rw-s 00001000 00:1b 5    /dev/shm/torch_1",
            "7f0000002000-7f0000004000 rw-s 00003000 00:1b 5    /dev/shm/torch_1",
            "7f0000004000-7f0000005000 rw-s 00009000 00:1b 5    /dev/shm/torch_1",
            "7f0000005000-7f0000006000 rw-s 00000000 00:1b 6    /dev/shm/torch_2 (deleted)",
            "7f0000006000-7f0000007000 rw-p 00000000 00:1b 7    /dev/shm/torch_3",
            "7f0000007000-7f0000008000 rw-p 00000000 00:00 0",
        ]
        start = 0x7F0000000000
        assert segments.shared_files(lines) == [
            SharedFile(start, 4 * PAGE, PAGE, "/dev/shm/torch_1"),
            SharedFile(start + 4 * PAGE, PAGE, 9 * PAGE, "/dev/shm/torch_1"),
        ]

    def test_a_source_may_use_any_host_memory(self, ours: ShmTransport) -> None:
        ours.register([region_of(np.zeros(100, dtype=np.uint8))], writable=False)
        assert names_of(ours) == []

    @pytest.mark.parametrize("writable", [True, False])
    def test_a_gpu_is_refused(self, ours: ShmTransport, writable: bool) -> None:
        with pytest.raises(TransportError, match="host memory only; use cuda or nixl"):
            ours.register([Region(4096, 100, Device("cuda", 1))], writable=writable)

    def test_regions_keep_their_order(self, ours: ShmTransport, theirs: ShmTransport) -> None:
        first, second = theirs.allocate(PAGE), theirs.allocate(2 * PAGE)
        parts = [second[PAGE:], first[100:200], second[:50], first[:100]]
        theirs.register([region_of(part) for part in parts], writable=True)
        data = np.arange(40, dtype=np.uint8)
        ours.register([region_of(data)], writable=False)
        pieces = [PlacedPiece(10 * i, i, 10, target_region=i) for i in range(4)]
        ours.write(ours.connect(theirs.metadata()), Op(1), binding_of(pieces))
        assert ours.poll() == [(1, None, "")]
        for i, part in enumerate(parts):
            assert part[i : i + 10].tolist() == list(range(10 * i, 10 * i + 10))

    def test_too_large_an_allocation_is_refused(self, ours: ShmTransport) -> None:
        mounted = Path("/dev/shm")
        if not mounted.is_dir() or not os.statvfs(mounted).f_blocks:
            pytest.skip("this machine has no limit on shared memory")
        with pytest.raises(TransportError, match=r"no room for \d+ bytes; enlarge /dev/shm"):
            ours.allocate(1 << 50)
        assert ours.allocate(PAGE).nbytes == PAGE


class TestLifetime:
    def test_close_unlinks_and_leaves_views_usable(self) -> None:
        transport = make()
        array = transport.allocate(PAGE)
        transport.register([region_of(array)], writable=True)
        (name,) = names_of(transport)
        assert exists(name)
        transport.close()
        transport.close()
        assert not exists(name)
        array[:] = 3
        assert array.sum() == 3 * PAGE

    def test_a_write_after_disconnect_or_close_fails(
        self, ours: ShmTransport, theirs: ShmTransport
    ) -> None:
        array = theirs.allocate(PAGE)
        theirs.register([region_of(array)], writable=True)
        ours.register([region_of(np.ones(PAGE, dtype=np.uint8))], writable=False)
        remote = ours.connect(theirs.metadata())
        ours.disconnect(remote)
        ours.write(remote, Op(1), binding_of([PlacedPiece(0, 0, 10)]))
        remote = ours.connect(theirs.metadata())
        ours.close()
        ours.write(remote, Op(2), binding_of([PlacedPiece(0, 0, 10)]))
        assert [ended.fate for ended in ours.poll()] == [WriteFate.FAILED, WriteFate.FAILED]
        assert not array.any()

    @pytest.mark.parametrize("kill", [os.kill, os.killpg, kill_tree], ids=lambda it: it.__name__)
    def test_a_killed_process_leaves_no_segment(self, kill: Callable[..., None]) -> None:
        body = """
            import torch
            cache = torch.zeros(1000)
            transport.adopt([cache])
            array = registered(1 << 20)
            made = segments.find_shared_file(cache.data_ptr(), 4000).path.removeprefix("/dev/shm")
            print(name_of(transport), made, flush=True)
            sys.stdin.read()
        """
        child = subprocess.Popen(
            [sys.executable, "-c", script(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with child:
            assert child.stdout is not None
            names = child.stdout.readline().split()
            assert [exists(name) for name in names] == [True, True]
            kill(child.pid, signal.SIGKILL)
            for name in names:
                await_gone(name)

    def test_a_forked_childs_segments_are_removed_with_it_alone(self) -> None:
        body = """
            array = registered(1 << 20)
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                segment = segments.Segment(100)
                os.write(write, segment.name.encode())
                signal.pause()
            theirs = os.read(read, 100).decode()
            print(name_of(transport), theirs, child, flush=True)
            sys.stdin.read()
        """
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            ours, theirs, grandchild = child.stdout.readline().split()
            os.kill(int(grandchild), signal.SIGKILL)
            await_gone(theirs)
            assert exists(ours)
            child.kill()
            await_gone(ours)

    def test_a_killed_cleanup_process_is_replaced(self) -> None:
        body = """
            first = segments.Segment(100)
            pipe = os.readlink(f"/proc/self/fd/{segments._cleanup._pipe}")
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                try:
                    if pid != os.getpid() and os.readlink(f"/proc/{pid}/fd/0") == pipe:
                        os.kill(pid, signal.SIGKILL)
                        print("killed", flush=True)
                        while os.path.exists(f"/proc/{pid}"):
                            time.sleep(0.01)
                except OSError:
                    continue
            second = segments.Segment(100)
            print(first.name, second.name, flush=True)
            signal.pause()
        """
        child = subprocess.Popen(
            [sys.executable, "-c", script(body)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "killed\n"
            names = child.stdout.readline().split()
            assert exists(names[1])
            child.kill()
            for name in names:
                await_gone(name)

    def test_a_spawned_workers_segments_are_removed_while_its_parent_lives(
        self, tmp_path: Path
    ) -> None:
        """``multiprocessing.shared_memory`` would keep them until the parent ends."""
        body = """
            import multiprocessing, time

            def worker(connection):
                array = registered(1 << 20)
                connection.send(name_of(transport))
                time.sleep(60)

            def exists(name):
                try:
                    segments.attach(name, 0).close()
                except Exception:
                    return False
                return True

            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                context.Semaphore()  # The parent's own tracker is running.
                ours, theirs = context.Pipe()
                process = context.Process(target=worker, args=(theirs,))
                process.start()
                name = ours.recv()
                assert exists(name)
                process.kill()
                process.join()
                deadline = time.monotonic() + 20
                while exists(name) and time.monotonic() < deadline:
                    time.sleep(0.01)
                print("left behind" if exists(name) else "gone")
        """
        path = tmp_path / "spawning.py"
        path.write_text(script(body))
        result = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, check=True, timeout=60
        )
        assert result.stdout.strip() == "gone"

    @pytest.mark.parametrize("ending", ["transport.close()", "del transport", "pass"])
    def test_the_interpreter_exits_silently(self, ending: str) -> None:
        """With live views, whether the transport was closed or not."""
        result = run(f"""
            array = registered(1 << 20)
            kept = array[5:10].reshape(5, 1)
            peer = ShmTransport(TransportSetup(agent="peer", copy=copy_by_memmove))
            remote = peer.connect(transport.metadata())
            print(name_of(transport))
            {ending}
        """)
        assert (result.returncode, result.stderr) == (0, "")
        assert not exists(result.stdout.strip())

    def test_a_forked_child_removes_nothing(self) -> None:
        result = run("""
            array = registered(1 << 20)
            if os.fork() == 0:
                sys.exit(0)
            assert os.wait()[1] == 0
            segments.attach(name_of(transport), 1 << 20)
            print("still there")
        """)
        assert (result.stdout, result.stderr) == ("still there\n", "")


class TestConnecting:
    @staticmethod
    def metadata(names: Sequence[str], regions: Sequence[tuple[int, int, int]]) -> bytes:
        body = {"type": "shm", "segments": names, "regions": regions}
        return msgspec.msgpack.encode(body)

    def test_a_missing_segment_is_refused(self, ours: ShmTransport) -> None:
        metadata = self.metadata(["/kvferry-0123456789abcdef"], [(0, 0, 10)])
        with pytest.raises(TransportError, match=r"cannot be opened .* has ended, or"):
            ours.connect(metadata)

    @pytest.mark.parametrize("name", ["/psm_1234", "/../etc/passwd", "", "/kvferry-\0", "x" * 300])
    def test_only_kvferry_names_are_opened(self, ours: ShmTransport, name: str) -> None:
        with pytest.raises(TransportError, match="cannot read"):
            ours.connect(self.metadata([name], []))

    @pytest.mark.parametrize(
        "region",
        [
            (0, 0, 2**40),
            (0, 2**61, 2**61),
            (0, PAGE, 2**16),
            (1, 0, 1),
            (-1, 0, 1),
            (0, -1, 1),
            (0, 0, -1),
            (0, 2**63, 1),
        ],
    )
    def test_regions_must_lie_in_their_segments(
        self, ours: ShmTransport, theirs: ShmTransport, region: tuple[int, int, int]
    ) -> None:
        theirs.register([region_of(theirs.allocate(PAGE))], writable=True)
        with pytest.raises(TransportError):
            ours.connect(self.metadata(names_of(theirs), [region]))

    def test_another_users_segment_is_refused(self) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can become another user")
        result = run("""
            array = registered(1 << 20)
            if os.fork() == 0:
                os.setuid(65534)
                try:
                    transport.connect(transport.metadata())
                except Exception as error:
                    print(type(error).__name__, error)
                sys.exit(0)
            os.wait()
        """)
        assert result.stdout.startswith("TransportError the peer's shared memory belongs to")

    def test_nothing_is_mapped_when_connecting_fails(
        self, ours: ShmTransport, theirs: ShmTransport
    ) -> None:
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("only Linux lists mappings")
        theirs.register([region_of(theirs.allocate(PAGE))], writable=True)
        names = [*names_of(theirs), "/kvferry-0123456789abcdef"]
        before = maps.read_text().count(names[0])
        with pytest.raises(TransportError):
            ours.connect(self.metadata(names, [(0, 0, 1)]))
        assert maps.read_text().count(names[0]) == before


def test_an_exception_in_a_copy_fails_only_its_write(theirs: ShmTransport) -> None:
    def copy(binding: Binding, sources: Sequence[int], targets: Sequence[int]) -> None:
        if binding.num_bytes == 13:
            raise ArithmeticError("thirteen")
        copy_by_memmove(binding, sources, targets)

    array = theirs.allocate(PAGE)
    theirs.register([region_of(array)], writable=True)
    ours, data = make(copy), np.ones(PAGE, dtype=np.uint8)
    ours.register([region_of(data)], writable=False)
    called: list[int] = []
    ours.on_completion = lambda: called.append(len(called))
    remote = ours.connect(theirs.metadata())
    ours.write(remote, Op(1), binding_of([PlacedPiece(0, 0, 13)]))
    ours.write(remote, Op(2), binding_of([PlacedPiece(0, 0, 14)]))
    assert ours.poll() == [
        (1, WriteFate.FAILED, "copying failed (ArithmeticError: thirteen)"),
        (2, None, ""),
    ]
    assert called == [0, 1]
    assert array.sum() == 14
    ours.close()


class TestSeparateDevShm:
    """A process with its own /dev/shm of 1 MiB, as in a container."""

    @pytest.fixture
    def apart(self) -> list[str]:
        mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
        before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
        try:
            subprocess.run([*before, "true"], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this machine does not allow mount namespaces")
        return before

    def test_the_realm_differs(self, ours: ShmTransport, apart: list[str]) -> None:
        body = "print(transport.realm)"
        assert run(body).stdout.strip() == ours.realm
        result = run(body, *apart)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.strip() != ours.realm
        assert result.stdout.startswith("shm:")

    def test_too_large_an_allocation_fails_at_once(self, apart: list[str]) -> None:
        body = """
            try:
                transport.allocate(2 << 20)
            except Exception as error:
                print(type(error).__name__, error)
            registered(1 << 19)[:] = 1
        """
        result = run(body, *apart)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("TransportError shared memory has no room for 2097152 b")


class TestLeftovers:
    """Segments of processes that were killed together with their cleanup processes."""

    def test_the_next_transport_removes_leftovers(self) -> None:
        body = """
            segment = segments.Segment(100)
            pipe = os.readlink(f"/proc/self/fd/{segments._cleanup._pipe}")
            for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
                try:
                    if pid != os.getpid() and os.readlink(f"/proc/{pid}/fd/0") == pipe:
                        os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
            print(segment.name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        killed = subprocess.run(
            [sys.executable, "-c", script(body)], stdout=subprocess.PIPE, text=True, check=False
        )
        assert killed.returncode == -signal.SIGKILL
        mine = segments.Segment(100)
        run("")
        assert not exists(killed.stdout.strip())
        assert exists(mine.name)
        mine.close()

    def test_an_unlocked_segment_is_a_leftover(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"kvferry-{number:016x}" for number in range(3)]
        for path in (*paths, tmp_path / "kvferry-of-another-kind"):
            path.touch()
        held = os.open(paths[1], os.O_RDWR)
        assert segments._lock_new(held)
        assert sorted(segments.leftovers(tmp_path)) == [paths[0], paths[2]]
        os.close(held)
        assert sorted(segments.leftovers(tmp_path)) == paths

    def test_a_new_segment_removed_as_a_leftover_is_not_used(self, tmp_path: Path) -> None:
        """Another process may remove leftovers between a segment's creation and its lock."""
        path = tmp_path / f"kvferry-{1:016x}"
        path.touch()
        made = os.open(path, os.O_RDWR)
        with segments._locked_leftover(path) as is_leftover:
            assert is_leftover
            assert not segments._lock_new(made)
            path.unlink()
        assert not segments._lock_new(made)
        os.close(made)
