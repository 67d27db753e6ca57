"""The engine's thread: takes jobs, steps the engine, and reports what becomes of them.

Other threads submit and cancel through a queue and read ``snapshot``. If a rank is lost or a
step raises, every job is told, the engine is closed and the thread ends; ``died`` has the
reason. Jobs of the failing step get another code than the rest: they may be the cause, so a
router must not send them to the next worker.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRole
from kvferry.reference.ranks.processes import RankBroke, RankLost
from kvferry.reference.transfer.extensions import RoomExtension
from kvferry.reference.worker.jobs import RoomEnds, ServeJob, Trouble
from kvferry.reference.worker.running import RunningJobs, Snapshot

log = logging.getLogger(__name__)

JOIN_S = 30.0


class EngineLoop:
    """An engine in a thread of its own; ``make`` is called there."""

    def __init__(self, make: Callable[[], Engine], role: EngineRole) -> None:
        self._make = make
        self._role = role
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stopping = False
        self.ends = RoomEnds()
        self.snapshot = Snapshot()
        self.ready: Future[Engine] = Future()
        # Done when no more steps are made: with None, or with what stopped them.
        self.died: Future[BaseException | None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # ------------------------------------------------------------ for any thread

    def begin(self) -> None:
        """Start the thread; ``ready`` has the engine, or why there is none."""
        self._thread.start()

    def submit(self, job: ServeJob) -> None:
        """Begin a job."""
        self._calls.put(lambda: self._begin(job))
        if self.died.done():
            self._refuse(job)

    def cancel(self, job: ServeJob) -> None:
        """Stop a job whose caller has left, unless it was answered."""
        self._calls.put(lambda: self._running.stop(job))

    def abandon(self, room: str) -> None:
        """Give up an open room, even if its request was answered."""
        self._calls.put(lambda: self._running.abandon(room))

    def stop(self) -> None:
        """End every job, the engine and the thread. Idempotent."""
        self._calls.put(self._end)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        reason: BaseException | None = None
        # From here on, waiting callers cannot cancel it.
        self.ready.set_running_or_notify_cancel()
        try:
            engine = self._make()
            self._running = RunningJobs(engine, self._role, self.ends)
        except BaseException as error:
            self.ready.set_exception(error)
            self.died.set_result(error)
            return
        try:
            if isinstance(engine.ranks.worker.extension, RoomExtension):
                look_soon = self._running.look_soon
                engine.ranks.worker.extension.on_news = lambda: self._calls.put(look_soon)
            self.snapshot = self._running.snapshot()
            self.ready.set_result(engine)
            while not self._stopping:
                self._run_calls(self._running.wait_s())
                if not self._stopping:
                    self._running.step()
                    self.snapshot = self._running.snapshot()
        except RankLost as error:
            log.error("engine-lost reason=%r", str(error))
            reason = error
        except Exception as error:
            log.exception("engine-broken")
            reason = error
        finally:
            self._close(engine, reason)

    def _run_calls(self, timeout_s: float) -> None:
        """Run the queued calls; wait for the first."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=timeout_s)()
            while True:
                self._calls.get_nowait()()

    def _end(self) -> None:
        self._stopping = True

    def _begin(self, job: ServeJob) -> None:
        if self.died.done():
            self._refuse(job)
        else:
            self._running.begin(job)

    def _close(self, engine: Engine, reason: BaseException | None) -> None:
        self.died.set_result(reason)
        for job in self._running.jobs.values():
            self._tell_end(job, engine, reason)
        # Refuses the jobs that are still in the queue.
        self._run_calls(0)
        try:
            engine.close()
        except Exception:
            log.exception("engine-close-failed")

    @staticmethod
    def _tell_end(job: ServeJob, engine: Engine, reason: BaseException | None) -> None:
        why = f"this worker is ending ({reason})" if reason else "this worker is ending"
        if job.id not in engine.in_step:
            job.fail(Trouble.ENDED, f"{why}; ask another one, or try again")
        elif isinstance(reason, RankLost) and not isinstance(reason, RankBroke):
            job.fail(Trouble.LOST, f"{why} while it computed this request; try again")
        else:
            message = "the worker broke in a step with this request and ends; see its log"
            job.fail(Trouble.BROKE_WORKER, message)

    @staticmethod
    def _refuse(job: ServeJob) -> None:
        job.fail(Trouble.ENDED, "this worker has ended; ask another one")
