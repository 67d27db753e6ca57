"""A client of any discovery service: keeps ranks registered and watches instances.

One daemon thread with an event loop owns all state. Public methods hand it work and may be called
from any thread. Callbacks run on that thread and must be short.

The client outlives the service. While the service is away, known views stay valid; a service that
comes back empty gets every registration again at the next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.discovery.address import ETCD, STATIC
from kvferry.discovery.backoff import Backoff
from kvferry.discovery.base import Discovery
from kvferry.discovery.etcd import EtcdDiscovery
from kvferry.discovery.http.backend import HttpDiscovery
from kvferry.discovery.loop_thread import LoopThread
from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    Summaries,
)
from kvferry.discovery.static import StaticDiscovery
from kvferry.errors import Misuse
from kvferry.security.keys import ClusterKey

log = logging.getLogger("kvferry.discovery")

T = TypeVar("T")
Callback = Callable[[InstanceView | None], None]


LEASE_S = 10.0
# Longest wait before the first renewal, which tells when the next ones are due.
FIRST_RENEWAL_S = 5.0
# Long-poll timeout. Short, so that the reason for a missing instance is recent.
WAIT_S = 5.0
LEAVE_S = 2.0
# Errors that a retry of a registration would meet again.
PERMANENT_FAULTS = (
    DiscoveryFault.MALFORMED,
    DiscoveryFault.OVERSIZED,
    DiscoveryFault.UNSIGNED,
    DiscoveryFault.REPLACED,
    DiscoveryFault.NOT_FOUND,
)


@dataclass(eq=False, slots=True)
class _Registration:
    """A rank that is kept registered. ``first`` ends with its first registration."""

    record: RankRecord
    lease_s: float
    first: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class _Watch:
    """A watched instance.

    ``is_absent``: the service has said that it is not complete. ``eager``: callbacks that are
    called with the first answer, even if that is None.
    """

    name: str
    callbacks: list[Callback] = field(default_factory=list)
    view: InstanceView | None = None
    version: str = ""
    is_absent: bool = False
    eager: list[Callback] = field(default_factory=list)
    problem: str = "the discovery service has not answered yet"
    task: asyncio.Task[None] | None = None


class DiscoveryClient:
    """Registers ranks and watches instances at one discovery service, until ``close``.

    ``where`` is the URL of the built-in service, ``static:PATH`` for a static list in a file, or
    any ``Discovery``, which then belongs to this client.
    """

    def __init__(self, where: str | Discovery, key: ClusterKey | None = None) -> None:
        self.discovery = discovery_at(where, key) if isinstance(where, str) else where
        self._registrations: list[_Registration] = []
        self._watches: dict[str, _Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("kvferry-discovery-client", self._finish)

    # ------------------------------------------------------------ for any thread

    def register(self, record: RankRecord, lease_s: float = LEASE_S) -> Future[None]:
        """Keep a rank registered until ``close``.

        The future is done when the service has accepted it for the first time, and fails with
        ``DiscoveryError`` when the service has refused it permanently. Raises ``InputError`` if
        it can be refused without asking.
        """
        self.discovery.check(record)
        registration = _Registration(record, lease_s)
        self._thread.do(self._keep_registered, registration)
        return registration.first

    def watch(self, name: str, callback: Callback, *, eager: bool = False) -> None:
        """Call back with each new view of an instance, and with None when it has ended.

        The first call comes when the instance is complete, at once if it is known to be. With
        ``eager`` it comes with the first answer, and is None if the instance is not complete.
        """
        self._thread.do(self._begin_watch, name, callback, eager)

    def unwatch(self, name: str, callback: Callback) -> None:
        """Stop calling back. A call in progress continues."""
        self._thread.do(self._end_watch, name, callback)

    def resolve(self, name: str, timeout_s: float) -> InstanceView:
        """Wait until an instance is complete. Not for callbacks, which must not wait."""
        if self._thread.is_current:
            raise Misuse("resolve() waits and cannot be called from a callback; use watch()")
        found: Future[InstanceView] = Future()

        def take(view: InstanceView | None) -> None:
            if view is not None and not found.done():
                found.set_result(view)

        self.watch(name, take)
        try:
            return found.result(timeout_s)
        except TimeoutError:
            problem = self.problem(name)
            raise DiscoveryError(
                DiscoveryFault.INCOMPLETE,
                f"instance {name!r:.100} was not complete within {timeout_s:g} s: {problem}",
            ) from None
        finally:
            with contextlib.suppress(Misuse):
                self.unwatch(name, take)

    def problem(self, name: str) -> str:
        """Return why a watched instance is not known, according to the last answer."""
        watch = self._watches.get(name)
        return watch.problem if watch is not None else "the client was closed"

    def instances(self) -> Future[Summaries]:
        """Ask for the list of instances. The future may fail with ``DiscoveryError``."""
        result: Future[Summaries] = Future()
        self._thread.do(self._begin, self._list, result)
        return result

    def close(self) -> None:
        """Withdraw every rank, within a time limit, and end the thread. Idempotent."""
        self._thread.close()

    def __enter__(self) -> DiscoveryClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------ on the thread: list, close

    def _begin(
        self, work: Callable[[T], Coroutine[Any, Any, None]], argument: T
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work(argument))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _list(self, result: Future[Summaries]) -> None:
        try:
            result.set_result(await _guarded(self.discovery.list()))
        except DiscoveryError as error:
            result.set_exception(error)
        except asyncio.CancelledError:
            result.set_exception(_closed())
            raise

    async def _finish(self) -> None:
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*(self._withdraw(one.record) for one in self._registrations))
        for registration in self._registrations:
            if not registration.first.done():
                registration.first.set_exception(_closed())
        await self.discovery.close()

    async def _withdraw(self, record: RankRecord) -> None:
        try:
            await _guarded(self.discovery.withdraw(record))
        except DiscoveryError as error:
            # The lease ends on its own.
            log.info("unregister-failed peer=%s fault=%s", record.peer, error.fault)

    # ------------------------------------------------------------ on the thread: registrations

    def _keep_registered(self, registration: _Registration) -> None:
        self._registrations.append(registration)
        self._begin(self._keep, registration)

    async def _keep(self, registration: _Registration) -> None:
        """Register, renew, and register again when the service has lost the registration."""
        backoff, is_registered = Backoff(), False
        while True:
            try:
                pause_s = await self._register_or_renew(registration, is_registered)
            except DiscoveryError as error:
                if is_registered and error.fault is DiscoveryFault.NO_LEASE:
                    is_registered = False
                    continue
                # A rank that was replaced keeps trying, until its replacement has left.
                delay_s = backoff.next_s()
                self._report_failure(registration, error, first=backoff.is_first)
                await asyncio.sleep(delay_s)
                continue
            if not is_registered or backoff.has_errors:
                log.info("registered peer=%s url=%s", registration.record.peer, self.discovery)
            is_registered = True
            backoff.reset()
            await asyncio.sleep(pause_s)

    async def _register_or_renew(self, registration: _Registration, is_registered: bool) -> float:
        """Return when the next renewal is due, in seconds."""
        if is_registered:
            return await _guarded(self.discovery.renew(registration.record, registration.lease_s))
        await _guarded(self.discovery.register(registration.record, registration.lease_s))
        if not registration.first.done():
            registration.first.set_result(None)
        return min(registration.lease_s / 3, FIRST_RENEWAL_S)

    def _report_failure(
        self, registration: _Registration, error: DiscoveryError, first: bool
    ) -> None:
        level = logging.WARNING if first else logging.DEBUG
        peer, text = registration.record.peer, str(error)
        log.log(level, "not-registered peer=%s fault=%s error=%r", peer, error.fault, text)
        if error.fault in PERMANENT_FAULTS and not registration.first.done():
            registration.first.set_exception(error)

    # ------------------------------------------------------------ on the thread: watches

    def _begin_watch(self, name: str, callback: Callback, eager: bool) -> None:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = _Watch(name)
            watch.task = self._begin(self._follow, watch)
        watch.callbacks.append(callback)
        if watch.view is not None or (eager and watch.is_absent):
            _call(callback, watch)
        elif eager:
            watch.eager.append(callback)

    def _end_watch(self, name: str, callback: Callback) -> None:
        watch = self._watches.get(name)
        if watch is None or callback not in watch.callbacks:
            return
        watch.callbacks.remove(callback)
        watch.eager = [each for each in watch.eager if each is not callback]
        if not watch.callbacks:
            del self._watches[name]
            if watch.task is not None:
                watch.task.cancel()

    async def _follow(self, watch: _Watch) -> None:
        # The first request does not wait, so that ``problem`` has a reason early.
        backoff, wait_s = Backoff(), 0.0
        while True:
            try:
                view = await _guarded(self.discovery.watch(watch.name, watch.version, wait_s))
            except DiscoveryError as error:
                watch.problem = str(error)
                is_incomplete = error.fault is DiscoveryFault.INCOMPLETE
                if is_incomplete:
                    self._update(watch, None)
                    backoff.reset()
                    wait_s = WAIT_S
                delay_s = backoff.next_s()
                if backoff.is_first and not is_incomplete:
                    log.warning(
                        "discovery-unreachable instance=%s fault=%s", watch.name, error.fault
                    )
                await asyncio.sleep(delay_s)
                continue
            backoff.reset()
            wait_s = WAIT_S
            if view is not None:
                self._update(watch, view)

    def _update(self, watch: _Watch, view: InstanceView | None) -> None:
        """Store a view, and call back if anything but its version has changed."""
        before = watch.view
        watch.view, watch.version = view, view.version if view is not None else ""
        watch.is_absent = view is None
        callbacks, watch.eager = watch.eager, []
        if view is not before and (view is None or not view.same_as(before)):
            log.info("instance name=%s complete=%s", watch.name, view is not None)
            callbacks = list(watch.callbacks)
        for callback in callbacks:
            _call(callback, watch)


def discovery_at(where: str, key: ClusterKey | None = None) -> Discovery:
    """Return the discovery service of a setting. Raises ``InputError`` if it names none."""
    if where.startswith(STATIC):
        return StaticDiscovery.read(where.removeprefix(STATIC))
    if where.startswith(ETCD):
        return EtcdDiscovery(where)
    return HttpDiscovery(where, key)


async def _guarded(call: Awaitable[T]) -> T:
    """Turn unexpected exceptions of an implementation into ``DiscoveryError``."""
    try:
        return await call
    except DiscoveryError:
        raise
    except Exception as error:
        log.exception("discovery-failed")
        raise DiscoveryError(
            DiscoveryFault.INTERNAL, f"the discovery backend failed ({error!r:.300}); see the log"
        ) from None


def _closed() -> DiscoveryError:
    return DiscoveryError(DiscoveryFault.STOPPING, "the client was closed; make a new one")


def _call(callback: Callback, watch: _Watch) -> None:
    try:
        callback(watch.view)
    except Exception:
        log.exception("callback-failed instance=%s", watch.name)
