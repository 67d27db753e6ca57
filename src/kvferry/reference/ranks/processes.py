"""The ranks of one instance as processes, driven by the first of them.

Rank 0 runs in the driver's process. The others are children that receive plans and return
answers through a pipe. A rank that dies, fails or does not answer in time ends the instance:
the call raises ``RankLost``, and the instance must be started again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from kvferry import InputError, KvferryError, Parallel, freeze_gc
from kvferry.reference.engine.requests import StepPlan, StepResult
from kvferry.reference.ranks.collectives import RankLinks, connected_pairs
from kvferry.reference.ranks.rank import RankSetup, RankWorker
from kvferry.telemetry.logs.lines import LogSettings, install, installed

log = logging.getLogger(__name__)

CLOSE_S = 5.0
EXPLAIN_S = 0.2
STOP = b""


class RankLost(KvferryError):
    """A rank of this instance is gone or does not answer; start the instance again."""


class RankBroke(RankLost):
    """A rank raised an exception in a step; start the instance again."""


class _PeerLost(RankLost):
    """A rank reports that another one does not answer."""


class RankFailure(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot go on.

    ``is_input``: it never started, and the user can correct that. ``is_lost``: another rank
    did not answer it.
    """

    message: str
    is_input: bool
    is_lost: bool


class RankAnswer(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready, or has run a step."""

    result: StepResult = StepResult()


_PLANS = msgspec.msgpack.Decoder(StepPlan)
_ANSWERS: msgspec.msgpack.Decoder[RankAnswer | RankFailure] = msgspec.msgpack.Decoder(
    RankAnswer | RankFailure
)


class _Child(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection


class Ranks:
    """All ranks of an instance; ``run`` gives each the same plan."""

    def __init__(self, setup: RankSetup) -> None:
        self._lost_s = setup.lost_s
        self._children: list[_Child] = []
        self._worker: RankWorker | None = None
        self._is_broken = False
        self._undo = contextlib.ExitStack()
        folder = Path()
        if setup.device != "cpu":
            made = tempfile.TemporaryDirectory(prefix="kvferry-ranks-")
            folder = Path(self._undo.enter_context(made))
        parallel = setup.layout.sharding
        assert isinstance(parallel, Parallel)
        links = {
            rank: RankLinks(ends, folder, setup.timeout_s)
            for rank, ends in connected_pairs(parallel.tp, parallel.pp).items()
        }
        try:
            for rank in range(1, setup.layout.num_ranks):
                self._children.append(_start(setup, rank, links[rank]))
            try:
                self._worker = RankWorker(setup, 0, links[0])
            except RuntimeError as error:
                # Meeting the others failed; usually one of them knows why.
                self._explain(error)
            for child in self._children:
                self._answer(child, time.monotonic() + setup.timeout_s)
        except BaseException:
            self._is_broken = True
            self.close()
            raise

    @property
    def worker(self) -> RankWorker:
        """Rank 0, which runs in this process."""
        assert self._worker is not None
        return self._worker

    def check(self) -> None:
        """Raise ``RankLost`` if the process of a rank has ended."""
        for child in self._children:
            if not child.process.is_alive():
                raise RankLost(f"the process of rank {child.rank} has ended")

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run one step on every rank; return the answers in rank order."""
        try:
            return self._run(plan)
        except BaseException:
            self._is_broken = True
            raise

    def _run(self, plan: StepPlan) -> list[StepResult]:
        data = msgspec.msgpack.encode(plan)
        try:
            for child in self._children:
                child.pipe.send_bytes(data)
            own = self.worker.execute(plan)
        except (OSError, RuntimeError) as error:
            if not self._children:
                raise
            self._explain(error)
        # Ranks compute side by side, so the others are about done now.
        deadline = time.monotonic() + self._lost_s
        return [own, *(self._answer(child, deadline) for child in self._children)]

    def _answer(self, child: _Child, deadline: float) -> StepResult:
        try:
            if not child.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankLost(f"rank {child.rank} has not answered for {self._lost_s:g} s")
            answer = _ANSWERS.decode(child.pipe.recv_bytes())
        except (EOFError, OSError):
            raise RankLost(f"the process of rank {child.rank} has ended") from None
        if isinstance(answer, RankAnswer):
            return answer.result
        if answer.is_input:
            raise InputError(answer.message)
        kind = _PeerLost if answer.is_lost else RankBroke
        raise kind(f"rank {child.rank} failed: {answer.message}")

    def _explain(self, error: Exception) -> NoReturn:
        """Raise the failure of the rank behind an error of rank 0, if one reports it."""
        for child in self._children:
            if child.pipe.poll(EXPLAIN_S):
                with contextlib.suppress(_PeerLost):
                    self._answer(child, time.monotonic())
        raise RankLost(f"the ranks lost each other ({error}); start the instance again") from error

    def close(self) -> None:
        """End every rank; at once if one is broken, because the others may wait for it."""
        children, self._children = self._children, []
        for child in children:
            try:
                child.pipe.send_bytes(STOP)
            except OSError:
                log.info("rank_ended_before rank=%d", child.rank)
        if self._worker is not None:
            self._worker.close()
        deadline = time.monotonic() + (0 if self._is_broken else CLOSE_S)
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.pipe.close()
        self._undo.close()


def _start(setup: RankSetup, rank: int, links: RankLinks) -> _Child:
    # The fork server imports torch once and forks every rank before any thread or GPU is in use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.reference.ranks.preload"])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=rank_main,
        args=(theirs, setup, rank, links, installed()),
        name=f"rank-{rank}",
        daemon=True,
    )
    process.start()
    for connection in (theirs, *links.ends.values()):
        connection.close()
    return _Child(rank, process, ours)


def rank_main(
    pipe: Connection,
    setup: RankSetup,
    rank: int,
    links: RankLinks,
    log_as: LogSettings | None = None,
) -> None:
    """Run a rank until the driver stops it or is gone; log as the driver does."""
    if log_as is not None:
        install(log_as._replace(rank=rank))
    # Ctrl-C is for the driver, which then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = None
    try:
        worker = RankWorker(setup, rank, links)
        freeze_gc()
        pipe.send_bytes(msgspec.msgpack.encode(RankAnswer()))
        while data := pipe.recv_bytes():
            answer = RankAnswer(worker.execute(_PLANS.decode(data)))
            pipe.send_bytes(msgspec.msgpack.encode(answer))
        worker.close()
    except EOFError:
        log.info("driver_gone rank=%d", rank)
    except Exception as error:
        log.exception("rank_failed rank=%d", rank)
        is_input = worker is None and isinstance(error, InputError)
        failure = RankFailure(str(error), is_input, isinstance(error, OSError))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(msgspec.msgpack.encode(failure))
