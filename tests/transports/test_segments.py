"""Segments of shared memory: who removes them, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transports.shm_scripts import (
    PAGE,
    await_gone,
    exists,
    kill_tree,
    make,
    names_of,
    region_of,
    run,
    script,
)

from kvferry.transports import segments


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
            kill_cleanup()
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
            import multiprocessing

            def worker(connection):
                array = registered(1 << 20)
                connection.send(name_of(transport))
                signal.pause()

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


class TestLeftovers:
    """Segments of processes that were killed together with their cleanup processes."""

    def test_the_next_transport_removes_leftovers(self) -> None:
        body = """
            segment = segments.Segment(100)
            kill_cleanup()
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
