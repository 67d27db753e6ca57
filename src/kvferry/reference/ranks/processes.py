"""The ranks of one instance as processes, driven by the first of them.

Rank 0 lives in the driver's own process; the others are children that are told
their plans through a pipe and answer through it. Their tensors travel by
``comm.py``. A rank that dies, fails or does not answer in time ends the instance:
the next call raises ``RankLost``, and whoever runs the instance starts it anew.
A rank that is silent, or a step that does not end, is found by ``rank_watch.py``.
It ends every other rank, and with them what the driver waits for: a rank that was
stopped for so long is not waited for when it goes on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from kvferry import InputError, KvferryError, freeze_gc
from kvferry.reference.engine.steps import StepPlan, StepResult
from kvferry.reference.ranks.figures import FiguresWriter, left_figures
from kvferry.reference.ranks.folders import RanksFolder
from kvferry.reference.ranks.rank import RankSetup, RankWorker
from kvferry.reference.ranks.watch import RankWatch, give_signs
from kvferry.telemetry.logs.lines import LogSettings, install, installed

log = logging.getLogger(__name__)

CLOSE_S = 5.0
WATCH_S = 0.2
STOP = b""


class RankLost(KvferryError):
    """A rank of this instance is gone or does not answer; start the instance again."""


class RankBroke(RankLost):
    """A rank raised an exception in a step; start the instance again."""


class RankFailure(msgspec.Struct, frozen=True, tag=True):
    """A rank could not go on. ``is_input`` where it never began and the user can put it right."""

    message: str
    is_input: bool


class RankAnswer(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready, or has run a step."""

    result: StepResult = StepResult()


_ENCODER = msgspec.msgpack.Encoder()
_PLANS = msgspec.msgpack.Decoder(StepPlan)
_ANSWERS: msgspec.msgpack.Decoder[RankAnswer | RankFailure] = msgspec.msgpack.Decoder(
    RankAnswer | RankFailure
)


class _Child(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection
    beats: Connection


class Ranks:
    """All ranks of an instance; ``run`` gives each the same plan.

    ``on_lost`` is called once, by the thread that watches, if a rank is silent or a
    step does not end.
    """

    def __init__(self, setup: RankSetup) -> None:
        self.on_lost: Callable[[RankLost], None] = lambda reason: None
        self._lost: RankLost | None = None
        self._watch: RankWatch | None = None
        self._timeout_s = setup.timeout_s
        self._children: list[_Child] = []
        self._closed = False
        num_ranks = setup.layout.num_ranks
        self._folder = RanksFolder()
        folder = self._folder.path
        try:
            self._children = [_start(setup, rank, folder) for rank in range(1, num_ranks)]
            self.worker = self._own(setup, folder)
        except BaseException:
            self._end_children(grace_s=0)
            raise
        try:
            for child in self._children:
                self._answer(child, time.monotonic() + self._timeout_s)
        except BaseException:
            self.close()
            raise
        beats = {child.rank: child.beats for child in self._children}
        self._watch = RankWatch(beats, setup.lost_s, self._lose)

    @property
    def figures(self) -> list[str]:
        """What the ranks of other processes have counted, as each said last. For any thread."""
        try:
            return left_figures(self._folder.path, [child.rank for child in self._children])
        except OSError:
            # They have just ended.
            return []

    def _own(self, setup: RankSetup, folder: Path) -> RankWorker:
        try:
            return RankWorker(setup, 0, folder)
        except RuntimeError as error:
            # Meeting the others failed; one of them can usually say why.
            self._explain(error)

    def _lose(self, reason: str) -> None:
        """Called by the watch. Whoever waits for a rank is freed by its end."""
        self._lost = RankLost(f"{reason}; start the instance again")
        for child in self._children:
            child.process.kill()
        self.on_lost(self._lost)

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Every rank's answer to one plan, in rank order."""
        assert self._watch is not None
        try:
            with self._watch.step():
                return self._run(plan)
        except (RankLost, OSError, RuntimeError):
            if self._lost is None:
                raise
            # What followed from it says less.
            raise self._lost from None

    def _run(self, plan: StepPlan) -> list[StepResult]:
        data = _ENCODER.encode(plan)
        try:
            for child in self._children:
                child.pipe.send_bytes(data)
            own = self.worker.execute(plan)
        except (OSError, RuntimeError) as error:
            if not self._children:
                raise
            self._explain(error)
        # Ranks compute side by side, so the others are about done now.
        deadline = time.monotonic() + self._timeout_s
        return [own, *(self._answer(child, deadline) for child in self._children)]

    def _answer(self, child: _Child, deadline: float) -> StepResult:
        try:
            if not child.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankLost(f"rank {child.rank} has not answered for {self._timeout_s:g} s")
            answer = _ANSWERS.decode(child.pipe.recv_bytes())
        except (EOFError, OSError):
            raise RankLost(f"the process of rank {child.rank} has ended") from None
        if isinstance(answer, RankAnswer):
            return answer.result
        if answer.is_input:
            raise InputError(answer.message)
        raise RankBroke(f"rank {child.rank} failed: {answer.message}")

    def _explain(self, error: Exception) -> NoReturn:
        """Say which rank is behind an error of our own, where one admits to it."""
        for child in self._children:
            self._answer_if_failed(child)
        raise RankLost(f"the ranks lost each other ({error}); start the instance again") from error

    def _answer_if_failed(self, child: _Child) -> None:
        if child.pipe.poll(0.2):
            self._answer(child, time.monotonic())

    def close(self) -> None:
        """End every rank. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        for child in self._children:
            try:
                child.pipe.send_bytes(STOP)
            except OSError:
                log.info("rank_ended_before rank=%d", child.rank)
        self.worker.close()
        self._end_children(grace_s=CLOSE_S)

    def _end_children(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for child in self._children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.pipe.close()
            child.beats.close()
        self._children = []
        self._folder.close()


def _start(setup: RankSetup, rank: int, folder: Path) -> _Child:
    # One server imports torch once and forks every rank from there, before any thread or GPU
    # is in use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.reference.ranks.preload"])
    ours, theirs = context.Pipe()
    seen, beats = context.Pipe(duplex=False)
    process = context.Process(
        target=rank_main,
        args=(theirs, beats, setup, rank, folder, installed()),
        name=f"rank-{rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    beats.close()
    return _Child(rank, process, ours, seen)


def rank_main(
    pipe: Connection,
    beats: Connection,
    setup: RankSetup,
    rank: int,
    folder: Path,
    log_as: LogSettings | None = None,
) -> None:
    """The life of a rank's process. It ends when the driver says so or is gone.

    It writes its log as the driver does, where that is ours.
    """
    if log_as is not None:
        install(log_as._replace(rank=rank))
    # Ctrl-C is for the driver, which then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = None
    started = threading.Event()
    threading.Thread(target=_end_with_driver, args=(pipe, started, folder), daemon=True).start()
    try:
        worker = RankWorker(setup, rank, folder)
        started.set()
        give_signs(beats, setup.lost_s)
        with closing(FiguresWriter(folder, rank)):
            freeze_gc()
            pipe.send_bytes(_ENCODER.encode(RankAnswer()))
            while data := pipe.recv_bytes():
                pipe.send_bytes(_ENCODER.encode(RankAnswer(worker.execute(_PLANS.decode(data)))))
        worker.close()
    except (EOFError, BrokenPipeError):
        log.info("driver_gone rank=%d", rank)
        _clear(folder)
    except Exception as error:
        log.exception("rank_failed rank=%d", rank)
        is_input = worker is None and isinstance(error, InputError)
        try:
            pipe.send_bytes(_ENCODER.encode(RankFailure(str(error), is_input)))
        except BrokenPipeError:
            _clear(folder)


def _clear(folder: Path) -> None:
    """Remove where the ranks met: the driver is gone and can't."""
    shutil.rmtree(folder, ignore_errors=True)


def _end_with_driver(pipe: Connection, started: threading.Event, folder: Path) -> None:
    """Until a rank has started it does not read its pipe, and it may wait long for the others.

    The driver says nothing in that time, so what comes is its end, or that it gives up.
    """
    while not started.wait(WATCH_S):
        if pipe.poll():
            _clear(folder)
            os._exit(1)
