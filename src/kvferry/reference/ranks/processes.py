"""The ranks of one instance as processes, driven by the first of them.

Rank 0 runs in the driver's process. The others are children that receive plans and return
answers through a pipe. A rank that dies, fails or does not answer in time ends the instance:
the call raises ``RankLost``, and the instance must be started again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, NoReturn

from kvferry import InputError, KvferryError, freeze_gc
from kvferry.reference.engine.requests import StepPlan, StepResult
from kvferry.reference.ranks.collectives import Sockets, connected
from kvferry.reference.ranks.rank import RankSetup, RankWorker
from kvferry.telemetry.logs.lines import LogSettings, install, installed

log = logging.getLogger(__name__)

CLOSE_S = 5.0
EXPLAIN_S = 0.2


class RankLost(KvferryError):
    """A rank of this instance is gone or does not answer; start the instance again."""


class RankBroke(RankLost):
    """A rank raised an exception in a step; start the instance again."""


class RankFailure(NamedTuple):
    """A rank cannot go on. ``is_input``: it never started, and the user can correct that."""

    message: str
    is_input: bool


class _Child(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection


class Ranks:
    """All ranks of an instance; ``run`` gives each the same plan."""

    def __init__(self, setup: RankSetup) -> None:
        self._lost_s = setup.options.lost_s
        self._children: list[_Child] = []
        self._worker: RankWorker | None = None
        # Whether a rank may be in the middle of a step or of its start.
        self._is_broken = True
        num_ranks = setup.options.tp
        sockets = connected(num_ranks, self._lost_s)
        try:
            for rank in range(1, num_ranks):
                self._children.append(_start(setup, rank, sockets[rank]))
            self._worker = RankWorker(setup, 0, sockets[0])
            deadline = time.monotonic() + setup.options.timeout_s
            for child in self._children:
                self._answer(child, deadline)
        except BaseException:
            self.close()
            raise
        self._is_broken = False

    @property
    def worker(self) -> RankWorker:
        """Rank 0, which runs in this process."""
        assert self._worker is not None
        return self._worker

    def run(self, plan: StepPlan) -> list[StepResult]:
        """Run one step on every rank; return the answers in rank order."""
        # Until the last answer is here.
        self._is_broken = True
        try:
            for child in self._children:
                child.pipe.send(plan)
            results = [self.worker.execute(plan)]
        except OSError as error:
            self._explain(error)
        # Ranks compute side by side, so the others are about done now.
        deadline = time.monotonic() + self._lost_s
        results += [self._answer(child, deadline) for child in self._children]
        self._is_broken = False
        return results

    def _answer(self, child: _Child, deadline: float) -> StepResult:
        try:
            if not child.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise RankLost(f"rank {child.rank} does not answer")
            answer: StepResult | RankFailure = child.pipe.recv()
        except (EOFError, OSError):
            raise RankLost(f"the process of rank {child.rank} has ended") from None
        if isinstance(answer, StepResult):
            return answer
        if answer.is_input:
            raise InputError(answer.message)
        raise RankBroke(f"rank {child.rank} failed: {answer.message}")

    def _explain(self, error: OSError) -> NoReturn:
        """Raise the failure of the rank behind an error of rank 0, if one reports it."""
        for child in self._children:
            if child.pipe.poll(EXPLAIN_S):
                self._answer(child, time.monotonic())
        raise RankLost(f"the ranks lost each other ({error}); start the instance again") from error

    def close(self) -> None:
        """End every rank; at once if one is broken, because the others may wait for it."""
        children, self._children = self._children, []
        for child in children:
            # It may have ended already.
            with contextlib.suppress(OSError):
                child.pipe.send(None)
        if self._worker is not None:
            self._worker.close()
        deadline = time.monotonic() + (0 if self._is_broken else CLOSE_S)
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.pipe.close()


def _start(setup: RankSetup, rank: int, sockets: Sockets) -> _Child:
    # The fork server imports torch once and forks every rank before any thread or GPU is in use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvferry.reference.ranks.preload"])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=rank_main,
        args=(theirs, setup, rank, sockets, installed()),
        name=f"rank-{rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    for end in sockets.values():
        end.close()
    return _Child(rank, process, ours)


def rank_main(
    pipe: Connection,
    setup: RankSetup,
    rank: int,
    sockets: Sockets,
    log_as: LogSettings | None = None,
) -> None:
    """Run a rank until the driver stops it or is gone; log as the driver does."""
    if log_as is not None:
        install(log_as._replace(rank=rank))
    # Ctrl-C is for the driver, which then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, name="kvferry-parent", daemon=True).start()
    worker = None
    try:
        worker = RankWorker(setup, rank, sockets)
        freeze_gc()
        pipe.send(StepResult())
        while plan := pipe.recv():
            pipe.send(worker.execute(plan))
        worker.close()
    except (EOFError, OSError) as error:
        log.info("driver_gone rank=%d reason=%r", rank, error)
    except Exception as error:
        log.exception("rank_failed rank=%d", rank)
        is_input = worker is None and isinstance(error, InputError)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(RankFailure(str(error), is_input))


def _end_with_driver() -> None:
    """End this process when the driver's has ended, also in the middle of a start or of a step."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
