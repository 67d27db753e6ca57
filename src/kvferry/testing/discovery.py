"""The conformance suite for discovery implementations: what ``discovery/base.py`` promises.

To test a discovery, subclass the suite in a test module::

    from kvferry.testing.discovery import DiscoverySuite

    class TestMine(DiscoverySuite):
        def make(self) -> Discovery:
            return MyDiscovery(...)     # a new client of one store, which is empty at first

For a discovery whose ranks are fixed, such as a static list of ``RECORDS``, subclass
``FixedCases``. The suite needs pytest.
"""

# Where a case's name says everything, it has no docstring.
# ruff: noqa: D102
from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.records import DiscoveryError, DiscoveryFault, InstanceView, RankRecord
from kvferry.layout import Layout, Parallel, attention

NAME = "prefill-0"
LAYOUT = Layout(attention(layers=2, kv_heads=4, head_dim=8), Parallel(tp=2))
RECORDS = tuple(
    RankRecord(
        instance=NAME,
        rank=rank,
        incarnation=100 + rank,
        fingerprint="model",
        layout=LAYOUT,
        transport="shm",
        control=f"tcp://127.0.0.1:{5000 + rank}",
    )
    for rank in range(2)
)
ENOUGH_S = 30.0
LEASE_S = 60.0
SHORT_S = 0.2
# Long enough that an instance is seen before its lease ends, even on a busy machine.
EXPIRES_S = 2.0

Talk = Callable[[Discovery, Discovery], Awaitable[None]]


class FixedCases(ABC):
    """Cases for every discovery, with the ranks of ``RECORDS``."""

    @abstractmethod
    def make(self) -> Discovery:
        """Return a new client of this test's store."""

    def run(self, talk: Talk) -> None:
        """Run ``talk`` with two clients of the store, in one event loop."""

        async def both() -> None:
            async with self._open() as one, self._open() as two:
                await talk(one, two)

        asyncio.run(both())

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Discovery]:
        discovery = self.make()
        try:
            yield discovery
        finally:
            await discovery.close()

    def test_registered_ranks_are_seen(self) -> None:
        """A watch and the list have them, with their addresses in order."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            assert [rank.control for rank in view.ranks] == [each.control for each in RECORDS]
            assert view.layout == LAYOUT
            assert view.fingerprint in (None, "model")
            summaries = (await two.list()).instances
            assert [(one.name, one.complete) for one in summaries] == [(NAME, True)]

        self.run(talk)

    def test_a_watch_returns_a_view_once(self) -> None:
        """A watch with the version of the last view times out, even after renewals."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            assert await two.watch(NAME, view.version, SHORT_S) is None
            for record in RECORDS:
                await one.renew(record, LEASE_S)
            assert await two.watch(NAME, view.version, SHORT_S) is None

        self.run(talk)

    def test_the_error_names_an_unknown_instance(self) -> None:

        async def talk(one: Discovery, two: Discovery) -> None:
            error = await refused(two.watch("nobody", "", SHORT_S))
            assert error.fault is DiscoveryFault.INCOMPLETE
            assert "'nobody'" in str(error)

        self.run(talk)

    def test_a_client_calls_every_watcher_and_ends_its_thread(self) -> None:
        """Watches from before the registration and from after it get the view."""
        before = set(threading.enumerate())
        seen: list[Future[InstanceView | None]] = [Future(), Future(), Future()]
        with DiscoveryClient(self.make()) as one, DiscoveryClient(self.make()) as two:
            for each in seen[:2]:
                two.watch(NAME, each.set_result)
            registered = [one.register(record) for record in RECORDS]
            for accepted in registered:
                accepted.result(ENOUGH_S)
            views = [each.result(ENOUGH_S) for each in seen[:2]]
            two.watch(NAME, seen[2].set_result)
            assert views == [two.resolve(NAME, ENOUGH_S)] * 2
            assert seen[2].result(ENOUGH_S) == views[0]
        assert not any(map(_is_client_thread, set(threading.enumerate()) - before))


class DiscoverySuite(FixedCases):
    """Cases for every discovery in which ranks come and go."""

    def test_a_watch_waits_for_the_last_rank(self) -> None:
        """An instance is incomplete until all of its ranks are registered."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await one.register(RECORDS[0], LEASE_S)
            error = await refused(two.watch(NAME, "", SHORT_S))
            assert error.fault is DiscoveryFault.INCOMPLETE
            watches = [asyncio.create_task(each.watch(NAME, "", ENOUGH_S)) for each in (one, two)]
            await one.register(RECORDS[1], LEASE_S)
            assert [lives(await each) for each in watches] == [[100, 101]] * 2

        self.run(talk)

    def test_a_withdrawn_rank_is_gone(self) -> None:
        """A watch ends at once, and the list has the rank no more; it may register again."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            watch = asyncio.create_task(two.watch(NAME, view.version, ENOUGH_S))
            await one.withdraw(RECORDS[1])
            assert (await refused(watch)).fault is DiscoveryFault.INCOMPLETE
            assert not any(each.complete for each in (await two.list()).instances)
            assert (await refused(one.withdraw(RECORDS[1]))).fault is DiscoveryFault.NO_LEASE
            await one.register(RECORDS[1], LEASE_S)
            assert lives(await found(two)) == [100, 101]

        self.run(talk)

    def test_a_lease_that_is_not_renewed_ends(self) -> None:
        """The rank is withdrawn, and its lease cannot be renewed any more."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await one.register(RECORDS[0], LEASE_S)
            await one.register(RECORDS[1], EXPIRES_S)
            view = await found(two)
            error = await refused(two.watch(NAME, view.version, ENOUGH_S))
            assert error.fault is DiscoveryFault.INCOMPLETE
            assert (await refused(one.renew(RECORDS[1], LEASE_S))).fault is DiscoveryFault.NO_LEASE

        self.run(talk)

    def test_another_incarnation_replaces_the_first(self) -> None:
        """A rank that was replaced can neither renew nor withdraw the new registration."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            again = replace(RECORDS[1], incarnation=7)
            watch = asyncio.create_task(two.watch(NAME, view.version, ENOUGH_S))
            await two.register(again, LEASE_S)
            assert lives(await watch) == [100, 7]
            assert (await refused(one.renew(RECORDS[1], LEASE_S))).fault is DiscoveryFault.REPLACED
            assert (await refused(one.withdraw(RECORDS[1]))).fault is DiscoveryFault.REPLACED
            assert lives(await found(two)) == [100, 7]

        self.run(talk)

    def test_ranks_that_disagree_make_no_instance(self) -> None:

        async def talk(one: Discovery, two: Discovery) -> None:
            await one.register(RECORDS[0], LEASE_S)
            await one.register(replace(RECORDS[1], fingerprint="another"), LEASE_S)
            assert (await refused(two.watch(NAME, "", SHORT_S))).fault is DiscoveryFault.INCOMPLETE

        self.run(talk)

    def test_a_client_that_closes_withdraws_its_ranks(self) -> None:
        news: list[Future[InstanceView | None]] = [Future(), Future()]
        waiting = iter(news)
        with DiscoveryClient(self.make()) as watcher:
            watcher.watch(NAME, lambda view: next(waiting).set_result(view))
            with DiscoveryClient(self.make()) as client:
                for record in RECORDS:
                    client.register(record, LEASE_S)
                assert lives(news[0].result(ENOUGH_S)) == [100, 101]
            # The ranks leave one by one, and the watcher is called once.
            assert news[1].result(ENOUGH_S) is None


async def register(discovery: Discovery) -> None:
    """Register every rank."""
    for record in RECORDS:
        await discovery.register(record, LEASE_S)


async def found(discovery: Discovery) -> InstanceView:
    """Wait for the complete instance."""
    view = await discovery.watch(NAME, "", ENOUGH_S)
    assert view is not None
    return view


async def refused(call: Awaitable[object]) -> DiscoveryError:
    """Return the error that a call must raise."""
    with pytest.raises(DiscoveryError) as error:
        await call
    return error.value


def lives(view: InstanceView | None) -> list[int | None]:
    """Return the incarnations of a view."""
    return [rank.incarnation for rank in view.ranks] if view is not None else []


def _is_client_thread(thread: threading.Thread) -> bool:
    return thread.name == "kvferry-discovery-client"
