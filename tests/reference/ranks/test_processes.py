"""Ranks as processes: what they are told, what they say, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from reference.driving import PROMPTS, ask, engine_of, requests, small

from kvferry.errors import InputError
from kvferry.layout.layout import Parallel
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest, Noted, Sample, StepPlan
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.ranks.processes import RankLost
from kvferry.reference.ranks.rank import Extension

Models = dict[TinyKind, Path]
LOST_S = 3.0
TCP, LISTEN = ("/proc/net/tcp", "/proc/net/tcp6"), "0A"


class Reporting(Extension):
    """Says what it is told. On the command "die" its process ends at once."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.notes: list[bytes] = []

    def start(self, cache: RankCache) -> None:
        self.notes.append(f"start {cache.rank} pid {os.getpid()}".encode())

    def before(self, plan: StepPlan) -> None:
        if f"die {self.rank}".encode() in plan.commands:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"fail {self.rank}".encode() in plan.commands:
            raise ValueError("this rank was told to fail")
        self.notes += plan.commands

    def after(self, plan: StepPlan, samples: Sequence[Sample]) -> list[bytes]:
        self.notes += [f"ran {work.first}-{work.end}".encode() for work in plan.works]
        self.notes += [f"sampled {sample.request}".encode() for sample in samples]
        said, self.notes = self.notes, []
        return said


def said(outputs: Sequence[object]) -> dict[int, list[bytes]]:
    notes: dict[int, list[bytes]] = {}
    for output in outputs:
        if isinstance(output, Noted):
            notes.setdefault(output.rank, []).append(output.note)
    return notes


def test_extensions_see_every_step_on_every_rank(models: Models) -> None:
    with engine_of(models[TinyKind.QWEN3], Parallel(tp=4), Reporting) as engine:
        started = said(engine.step(poll=True))
        assert [notes[0].split()[:2] for notes in started.values()] == [
            [b"start", str(rank).encode()] for rank in range(4)
        ]
        assert len({notes[0].split()[-1] for notes in started.values()}) == 4
        engine.add(EngineRequest(id="x", prompt=PROMPTS[2], max_tokens=1))
        engine.post(b"hello")
        first, second = said(engine.step()), said(engine.step())
        assert first == {rank: [b"hello", b"ran 0-96"] for rank in range(4)}
        lead = [b"ran 96-150", b"sampled x"]
        assert second == {0: lead, 1: lead[:1], 2: lead[:1], 3: lead[:1]}
        assert engine.step() == []


@pytest.mark.parametrize("order", [b"die 2", b"die 1", b"fail 2"])
def test_a_lost_rank_is_noticed_and_nothing_is_left(models: Models, order: bytes) -> None:
    engine = engine_of(models[TinyKind.LLAMA], Parallel(tp=3), Reporting, timeout_s=20)
    try:
        for request in requests():
            engine.add(request)
        engine.step()
        engine.post(order)
        with pytest.raises(RankLost):
            engine.step()
        with pytest.raises(RankLost):
            engine.step()
    finally:
        engine.close()
    assert not multiprocessing.active_children()


def test_the_failing_rank_is_named(models: Models) -> None:
    engine = engine_of(models[TinyKind.LLAMA], Parallel(tp=3), Reporting, timeout_s=20)
    engine.post(b"fail 1")
    with pytest.raises(RankLost, match="rank 1 failed: this rank was told to fail"):
        engine.step(poll=True)
    engine.close()


class Hanging(Extension):
    """Never comes back on rank 1 after the command "hang"."""

    def before(self, plan: StepPlan) -> None:
        if self.rank == 1 and b"hang" in plan.commands:
            threading.Event().wait()


def test_a_rank_that_hangs_ends_the_engine(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3), Hanging, lost_s=LOST_S) as engine:
        ask(engine, requests(max_tokens=1))
        engine.post(b"hang")
        engine.add(requests()[0])
        with pytest.raises(RankLost, match="rank 1 does not answer"):
            engine.step()
    assert not multiprocessing.active_children()


def test_a_stopped_rank_that_continues_in_time_costs_nothing(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3)) as engine:
        before = ask(engine, requests(max_tokens=2))
        (stopped, *_) = [child.pid for child in multiprocessing.active_children() if child.pid]
        os.kill(stopped, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (stopped, signal.SIGCONT))
        timer.start()
        after = ask(engine, requests(max_tokens=2))
        timer.join()
    assert [a.tokens for a in before] == [a.tokens for a in after]


KILLED = """
import multiprocessing, sys, time
from pathlib import Path
from kvferry.reference.engine.engine import Engine
from kvferry.reference.options import EngineOptions

if __name__ == "__main__":
    engine = Engine(Path(sys.argv[1]), EngineOptions(tp=3))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_ranks_end_when_their_driver_is_killed(models: Models, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(models[TinyKind.LLAMA])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        driver.kill()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its driver"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Unready(Extension):
    """Can't be started on the last rank."""

    def start(self, cache: RankCache) -> None:
        if self.rank == 2:
            raise InputError("plug it in")


def test_a_rank_that_cannot_start_leaves_no_process(models: Models) -> None:
    with pytest.raises(InputError, match="plug it in"):
        engine_of(models[TinyKind.LLAMA], Parallel(tp=3), Unready, timeout_s=20)
    assert not multiprocessing.active_children()
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3)) as engine:
        ask(engine, requests(max_tokens=1))


def test_instances_live_side_by_side_in_one_process(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3)) as engine:
        first = ask(engine, requests(max_tokens=2))
        with engine_of(models[TinyKind.LLAMA], Parallel(tp=6)) as other:
            beside = ask(other, requests(max_tokens=2))
        again = ask(engine, requests(max_tokens=2))
    assert [a.tokens for a in first] == [a.tokens for a in again] == [a.tokens for a in beside]


def test_ranks_listen_nowhere(models: Models) -> None:
    """A port of theirs would be open to every user of the machine."""
    before = listening(os.getpid())
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3)):
        children = [child.pid for child in multiprocessing.active_children() if child.pid]
        assert len(children) == 2
        assert listening(os.getpid()) - before == set()
        assert set().union(*map(listening, children)) == set()


def listening(pid: int) -> set[str]:
    """The sockets of a process that anybody could connect to."""
    links = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    rows = [line.split() for file in TCP for line in Path(file).read_text().splitlines()[1:]]
    return links & {f"socket:[{row[9]}]" for row in rows if row[3] == LISTEN}


def test_a_broken_model_is_one_sentence_and_leaves_no_process(
    models: Models, tmp_path: Path
) -> None:
    for path in models[TinyKind.LLAMA].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="download the model again"):
        Engine(tmp_path, small(parallel=Parallel(tp=3), timeout_s=20))
    assert not multiprocessing.active_children()
