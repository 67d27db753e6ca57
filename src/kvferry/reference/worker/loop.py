"""The engine's thread: takes jobs, steps the engine, and tells what becomes of them.

Other threads submit and cancel through a queue and read ``snapshot``. The jobs that the
engine has taken are in ``running``.

If a rank is lost, every job is told so, the engine is closed and the thread ends;
``died`` says why. Whoever runs the worker starts it anew. That a rank is silent, or
a step does not end, comes from another thread (``lose``), since this one may be stuck.

A job that ran in the failing step fails with another code than the other jobs: it may be the
cause, so the router must not send it to the next worker.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

import msgspec

from kvferry import KvferryError, TransferMode
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRole
from kvferry.reference.ranks.processes import RankBroke, RankLost
from kvferry.reference.transfer.extension import RoomExtension
from kvferry.reference.worker.ends import RoomEnds
from kvferry.reference.worker.jobs import ServeJob, Trouble
from kvferry.reference.worker.running import RunningJobs

log = logging.getLogger(__name__)

JOIN_S = 30.0
# A thread that is stuck is not waited for, but one that has just been freed may close its engine.
JOIN_LOST_S = 5.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine stands. ``carried_bytes`` are what its ranks have sent, by mode;
    ``links`` the transport that they have to each of their peers.

    ``rooms`` counts requests whose pages a transfer may touch, also those whose
    callers have left.
    """

    running: int = 0
    waiting: int = 0
    rooms: int = 0
    free_tokens: int = 0
    used_pages: int = 0
    used_rows: int = 0
    carried_bytes: dict[str, int] = {}
    links: dict[str, str] = {}


class EngineLoop:
    """An engine in a thread of its own. ``make`` is called there."""

    def __init__(self, make: Callable[[], Engine], role: EngineRole) -> None:
        self._make = make
        self._role = role
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        # Submitted, and not begun yet.
        self._coming: dict[str, ServeJob] = {}
        self._dying = threading.Lock()
        self.ends = RoomEnds()
        self._stopping = False
        self._lost = False
        self.snapshot = Snapshot()
        self.ready: Future[Engine] = Future()
        # Done when no more steps are made: with None, or what stopped them.
        self.died: Future[BaseException | None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ------------------------------------------------------------ for any thread

    def begin(self) -> None:
        """Start the thread; ``ready`` has the engine, or why there is none."""
        self._thread.start()

    @property
    def figures(self) -> list[str]:
        """What ranks of other processes count, for Prometheus."""
        is_there = self.ready.done() and self.ready.exception() is None
        return self.ready.result().figures if is_there else []

    def submit(self, job: ServeJob) -> None:
        """Begin a job."""
        self._coming[job.id] = job
        self._inbox.put(partial(self._begin, job))
        if self.died.done():
            job.fail(Trouble.ENDED, "this worker has ended; ask another one")

    def cancel(self, job: ServeJob) -> None:
        """Its caller has left. What was answered before goes on to its end."""
        self._inbox.put(lambda: self._running.stop(job))

    def abandon(self, room: str) -> None:
        """Nobody will come for this room: give it up, also if its request was answered."""
        self._inbox.put(lambda: self._running.abandon(room))

    def wake(self) -> None:
        """There is news from a room."""
        self._inbox.put(self._running.look)

    def lose(self, reason: KvferryError) -> None:
        """A rank is lost: every job is told now, even if the thread never comes back."""
        log.error("engine-lost reason=%r", str(reason))
        self._lost = True
        self._die(reason)
        self._inbox.put(self._end)

    def stop(self) -> None:
        """End every job, the engine and the thread. Idempotent."""
        self._inbox.put(self._end)
        if self._thread.ident is not None:
            self._thread.join(JOIN_LOST_S if self._lost else JOIN_S)

    def _die(self, reason: BaseException | None) -> None:
        with self._dying:
            if self.died.done():
                return
            self.died.set_result(reason)
        why = f"this worker is ending ({reason})" if reason else "this worker is ending"
        for job in (*self._coming.values(), *self._running.jobs.values()):
            if job.id not in self._running.engine.in_step:
                job.fail(Trouble.ENDED, f"{why}; ask another one, or try again")
            elif isinstance(reason, RankLost) and not isinstance(reason, RankBroke):
                job.fail(Trouble.LOST, f"{why} while it computed this request; try again")
            else:
                job.fail(
                    Trouble.BROKE_WORKER,
                    "the worker broke in a step with this request and ends; see its log",
                )

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason: BaseException | None = None
        # Who stops waiting for it does not change what it is.
        self.ready.set_running_or_notify_cancel()
        try:
            engine = self._make()
            self._running = RunningJobs(engine, self._role, self.ends)
        except BaseException as error:
            self.ready.set_exception(error)
            self.died.set_result(error)
            return
        try:
            engine.on_lost(self.lose)
            if isinstance(engine.worker.extension, RoomExtension):
                engine.worker.extension.on_news = self.wake
            self._look_around()
            self.ready.set_result(engine)
            while not self._stopping:
                self._turn()
        except RankLost as error:
            if not self.died.done():
                log.error("engine-lost reason=%r", str(error))
            reason = error
        except Exception as error:
            log.exception("engine-broken")
            reason = error
        finally:
            self._close(engine, reason)

    def _close(self, engine: Engine, reason: BaseException | None) -> None:
        self._die(reason)
        # What was submitted meanwhile is told so by ``_begin``.
        self._run_calls(0)
        try:
            engine.close()
        except Exception:
            log.exception("engine-close-failed")

    def _run_calls(self, timeout_s: float | None) -> None:
        """Run the queued calls, waiting up to ``timeout_s`` for the first."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)()
            while True:
                self._inbox.get_nowait()()

    def _turn(self) -> None:
        self._run_calls(self._running.wait_s())
        if not self._stopping:
            self._running.step()
            self._look_around()

    def _end(self) -> None:
        self._stopping = True

    def _look_around(self) -> None:
        running = self._running
        scheduler = running.engine.scheduler
        blocks = scheduler.blocks
        self.snapshot = Snapshot(
            running=scheduler.num_active,
            waiting=scheduler.num_waiting,
            rooms=running.num_rooms,
            free_tokens=blocks.num_available * blocks.page_tokens,
            used_pages=blocks.num_used,
            used_rows=blocks.num_used_rows,
            carried_bytes=_totals(running.carried.values()),
            links=_together(running.links.values()),
        )

    def _begin(self, job: ServeJob) -> None:
        self._coming.pop(job.id, None)
        if self.died.done():
            job.fail(Trouble.ENDED, "this worker has ended; ask another one")
        else:
            self._running.begin(job)


def _totals(ranks: Collection[Mapping[str, int]]) -> dict[str, int]:
    return {str(mode): sum(carried.get(mode, 0) for carried in ranks) for mode in TransferMode}


def _together(ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The transport to each peer; all that ranks have, where they differ."""
    found: dict[str, set[str]] = {}
    for links in ranks:
        for peer, transport in links.items():
            found.setdefault(peer, set()).add(transport)
    return {peer: "+".join(sorted(transports)) for peer, transports in sorted(found.items())}
