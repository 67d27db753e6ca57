"""A client of any discovery: keeps ranks registered and follows instances.

Everything happens in one daemon thread with an event loop, which owns all state;
public methods hand it work and may be called from any thread. Callbacks are
called in that thread and must be short.

It survives the service: while that is away, what was known stays known; a service
that comes back knowing nobody is told again at the next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from kvferry.discovery.base import Discovery
from kvferry.discovery.calls import Backoff
from kvferry.discovery.etcd import EtcdDiscovery
from kvferry.discovery.http_backend import HttpDiscovery
from kvferry.discovery.loop import LoopThread
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

STATIC = "static:"
ETCD = ("etcd://", "etcds://")

LEASE_S = 10.0
# Often enough that a service which has restarted is complete again before it is settled.
MOST_RENEWAL_S = 5.0
# How long one request waits for news. Short, so that the reason for their absence is fresh.
WAIT_S = 5.0
LEAVE_S = 2.0
# These are answers of a service that will not change its mind by being asked again.
FINAL = (
    DiscoveryFault.MALFORMED,
    DiscoveryFault.OVERSIZED,
    DiscoveryFault.UNSIGNED,
    DiscoveryFault.REPLACED,
    DiscoveryFault.NOT_FOUND,
)


@dataclass(eq=False, slots=True)
class _Registration:
    record: RankRecord
    lease_s: float
    first: Future[None] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class _Watch:
    name: str
    callbacks: list[Callback] = field(default_factory=list)
    view: InstanceView | None = None
    version: str = ""
    # Known to be not complete, and whom that is told though they never heard of a view.
    is_absent: bool = False
    eager: list[Callback] = field(default_factory=list)
    problem: str = "the discovery service has not answered yet"
    task: asyncio.Task[None] | None = None


class DiscoveryClient:
    """Registers ranks and follows instances at one discovery, until ``close``.

    ``where`` is the URL of the built-in service, ``static:PATH`` for a static list in a file, or
    any ``Discovery``, which from then on belongs to this client.
    """

    def __init__(self, where: str | Discovery, key: ClusterKey | None = None) -> None:
        self.discovery = discovery_at(where, key) if isinstance(where, str) else where
        self._registrations: list[_Registration] = []
        self._watches: dict[str, _Watch] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("kvferry-discovery-client", self._finish)

    # ------------------------------------------------------------ for any thread

    def register(self, record: RankRecord, lease_s: float = LEASE_S) -> Future[None]:
        """Keep a rank registered until ``close``.

        The future is done when the service has taken it for the first time, and
        fails with ``DiscoveryError`` when the service has refused it for good. Raises
        ``InputError`` if that is known without asking.
        """
        self.discovery.check(record)
        registration = _Registration(record, lease_s)
        self._thread.do(self._begin_registration, registration)
        return registration.first

    def watch(self, name: str, callback: Callback, *, eager: bool = False) -> None:
        """Call with each new view of an instance, and with None when it has ended.

        The first call comes when the instance is complete, at once if that is known. With
        ``eager`` it comes with the first answer, and is None where the instance is not complete.
        """
        self._thread.do(self._begin_watch, name, callback, eager)

    def unwatch(self, name: str, callback: Callback) -> None:
        """Call no more. A call that is under way goes on."""
        self._thread.do(self._end_watch, name, callback)

    def resolve(self, name: str, timeout_s: float) -> InstanceView:
        """Wait until an instance is complete. Not for callbacks, which must not wait."""
        if self._thread.is_current:
            raise Misuse("resolve waits and can't be called from a callback; use watch")
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
        """Why an instance that is watched is not there, as far as is known. Only reads."""
        watch = self._watches.get(name)
        return watch.problem if watch is not None else "the client was closed"

    def instances(self) -> Future[Summaries]:
        """Ask who is registered. Fails with ``DiscoveryError`` if nobody answers."""
        asked: Future[Summaries] = Future()
        self._thread.do(self._begin_asking, asked)
        return asked

    def close(self) -> None:
        """Say farewell for every rank, in bounded time, and end the thread. Idempotent."""
        self._thread.close()

    def __enter__(self) -> DiscoveryClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ the thread

    async def _finish(self) -> None:
        tasks = [registration.task for registration in self._registrations]
        tasks += [watch.task for watch in self._watches.values()]
        running = [*self._questions, *(task for task in tasks if task is not None)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        farewells = [self._leave(registration.record) for registration in self._registrations]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*farewells)
        for registration in self._registrations:
            if not registration.first.done():
                registration.first.set_exception(_closed())
        await self.discovery.close()

    async def _leave(self, record: RankRecord) -> None:
        try:
            await _answer(self.discovery.withdraw(record))
        except DiscoveryError as error:
            # Its lease will end by itself.
            log.info("no-farewell peer=%s fault=%s", record.peer, error.fault)

    # ------------------------------------------------------------ questions

    def _begin_asking(self, asked: Future[Summaries]) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(asked))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _ask(self, asked: Future[Summaries]) -> None:
        try:
            asked.set_result(await _answer(self.discovery.list()))
        except DiscoveryError as error:
            asked.set_exception(error)
        except asyncio.CancelledError:
            asked.set_exception(_closed())
            raise

    # ------------------------------------------------------------ registrations

    def _begin_registration(self, registration: _Registration) -> None:
        self._registrations.append(registration)
        registration.task = asyncio.get_running_loop().create_task(self._keep(registration))

    async def _keep(self, registration: _Registration) -> None:
        """Register, renew, and register again when the service has forgotten us."""
        backoff, registered = Backoff(), False
        pause_s = min(registration.lease_s / 3, MOST_RENEWAL_S)
        while True:
            try:
                await self._say(registration, registered)
            except DiscoveryError as error:
                if registered and error.fault is DiscoveryFault.NO_LEASE:
                    registered = False
                    continue
                # A place that was taken is asked for again until whoever took it has left.
                delay_s = backoff.next_s()
                self._complain(registration, error, first=backoff.is_first)
                await asyncio.sleep(delay_s)
                continue
            if not registered or backoff.has_errors:
                log.info("registered peer=%s url=%s", registration.record.peer, self.discovery)
            registered = True
            backoff.reset()
            await asyncio.sleep(pause_s)

    async def _say(self, registration: _Registration, registered: bool) -> None:
        if registered:
            await _answer(self.discovery.renew(registration.record, registration.lease_s))
            return
        await _answer(self.discovery.register(registration.record, registration.lease_s))
        if not registration.first.done():
            registration.first.set_result(None)

    def _complain(self, registration: _Registration, error: DiscoveryError, first: bool) -> None:
        level = logging.WARNING if first else logging.DEBUG
        log.log(
            level,
            "not-registered peer=%s fault=%s message=%r",
            registration.record.peer,
            error.fault,
            str(error),
        )
        if error.fault in FINAL and not registration.first.done():
            registration.first.set_exception(error)

    # ------------------------------------------------------------ watches

    def _begin_watch(self, name: str, callback: Callback, eager: bool) -> None:
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = _Watch(name)
            watch.task = asyncio.get_running_loop().create_task(self._follow(watch))
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
        # The first answer comes at once, so that there is a reason to show.
        backoff, wait_s = Backoff(), 0.0
        while True:
            try:
                news = self.discovery.watch(watch.name, watch.version, wait_s)
                view = await _answer(news)
            except DiscoveryError as error:
                watch.problem = str(error)
                if error.fault is DiscoveryFault.INCOMPLETE:
                    self._tell(watch, None)
                    backoff.reset()
                    wait_s = WAIT_S
                delay_s = backoff.next_s()
                if backoff.is_first and error.fault is not DiscoveryFault.INCOMPLETE:
                    log.warning("no-news instance=%s fault=%s", watch.name, error.fault)
                await asyncio.sleep(delay_s)
                continue
            backoff.reset()
            wait_s = WAIT_S
            if view is not None:
                self._tell(watch, view)

    def _tell(self, watch: _Watch, view: InstanceView | None) -> None:
        """Take a view, and pass it on if anything but its version is new."""
        before = watch.view
        watch.view, watch.version = view, view.version if view is not None else ""
        watch.is_absent = view is None
        eager, watch.eager = watch.eager, []
        if view is before or (view is not None and view.same_as(before)):
            for callback in eager:
                _call(callback, watch)
            return
        log.info("instance name=%s complete=%s", watch.name, view is not None)
        for callback in list(watch.callbacks):
            _call(callback, watch)


def discovery_at(where: str, key: ClusterKey | None = None) -> Discovery:
    """The discovery that a setting names. Raises ``InputError`` if it names none."""
    if where.startswith(STATIC):
        return StaticDiscovery.read(where.removeprefix(STATIC))
    if where.startswith(ETCD):
        return EtcdDiscovery(where)
    return HttpDiscovery(where, key)


async def _answer(call: Awaitable[T]) -> T:
    """The answer of a discovery. A bug in one must not end what goes on here."""
    try:
        return await call
    except DiscoveryError:
        raise
    except Exception as error:
        log.exception("discovery-failed")
        raise DiscoveryError(
            DiscoveryFault.INTERNAL, f"the discovery failed: {error!r:.300}"
        ) from None


def _closed() -> DiscoveryError:
    return DiscoveryError(DiscoveryFault.STOPPING, "the client was closed; make a new one")


def _call(callback: Callback, watch: _Watch) -> None:
    try:
        callback(watch.view)
    except Exception:
        log.exception("callback-failed instance=%s", watch.name)
