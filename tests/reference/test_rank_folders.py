"""Temporary folders of workers whose processes are all killed at once are removed later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

import pytest
from reference.clusters import family, wait_until

from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.ranks.folders import RanksFolder, leftovers

Models = dict[TinyKind, Path]

ENGINE = """
import sys, time
from pathlib import Path
from kvferry.layout.layout import Parallel
from kvferry.reference.engine.engine import Engine, EngineOptions

if __name__ == "__main__":
    options = EngineOptions(parallel=Parallel(tp=3), cache_tokens=2048, max_requests=16)
    engine = Engine(Path(sys.argv[1]), options)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, with a name short enough for sockets."""
    # Where this process keeps its fork server is for all of its tests.
    util.get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("kv", "pymp")))


def started(models: Models, folder: Path) -> subprocess.Popen[str]:
    program = folder / "engine.py"
    program.write_text(ENGINE)
    child = subprocess.Popen(
        [sys.executable, str(program), str(models[TinyKind.LLAMA])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_the_next_start_removes_what_killed_workers_left(models: Models, folder: Path) -> None:
    alive, killed = started(models, folder), started(models, folder)
    with alive, killed:
        assert len(left(folder)) == 4
        assert leftovers() == []
        everyone = [killed.pid, *family(killed.pid)]
        # All at once: none of them may see another one end.
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        for pid in everyone:
            os.kill(pid, signal.SIGKILL)
        killed.wait(30)
        wait_until(lambda: len(leftovers()) == 2, "the kernel to drop the locks")
        RanksFolder().close()
        assert leftovers() == []
        # The running worker keeps its folders.
        assert len(left(folder) or []) >= 2
        assert alive.stdin is not None
        alive.stdin.close()
        alive.wait(30)


def test_a_folder_is_nobodys_leftover_while_its_process_lives(folder: Path) -> None:
    first, second = RanksFolder(), RanksFolder()
    assert leftovers() == []
    first.close()
    first.close()
    assert leftovers() == []
    assert second.path.is_dir()
    second.close()


def make_ranks_folder() -> None:
    RanksFolder().close()


def test_a_child_leaves_its_parents_fork_server_alone() -> None:
    """It has the parent's temporary folder, and ends before the parent does."""
    context = multiprocessing.get_context("forkserver")
    mine = Path(util.get_temp_dir())
    for _ in range(2):
        child = context.Process(target=make_ranks_folder)
        child.start()
        child.join()
        assert child.exitcode == 0
    assert mine not in leftovers()
    RanksFolder().close()
    assert mine.is_dir()
