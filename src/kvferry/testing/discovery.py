"""The conformance suite for discoveries: what ``discovery/base.py`` promises. Needs pytest.

Whoever writes a discovery subclasses the suite in a test module::

    from kvferry.testing.discovery import DiscoverySuite

    class TestMine(DiscoverySuite):
        def make(self) -> Discovery:
            return MyDiscovery(...)     # each time another client of one store, empty at first

A discovery that can't change, such as a static list of ``RECORDS``, subclasses ``FixedCases``.
"""

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
# Long enough for an instance to be seen before it ends, on a busy machine.
EXPIRES_S = 2.0

Talk = Callable[[Discovery, Discovery], Awaitable[None]]


class FixedCases(ABC):
    """Cases for every discovery, with the instance of ``RECORDS`` registered."""

    @abstractmethod
    def make(self) -> Discovery:
        """Another client of the store that this test has."""

    def run(self, talk: Talk) -> None:
        """Have two clients of the store talk, in one event loop."""

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
        """By a watch and in the list, with their addresses in order."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            assert [rank.control for rank in view.ranks] == [each.control for each in RECORDS]
            assert view.layout == LAYOUT
            assert view.fingerprint in (None, "model")
            summaries = (await two.list()).instances
            assert [(one.name, one.complete) for one in summaries] == [(NAME, True)]

        self.run(talk)

    def test_a_view_is_not_told_twice(self) -> None:
        """A watch with its version ends without news."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await register(one)
            view = await found(two)
            assert await two.watch(NAME, view.version, SHORT_S) is None
            for record in RECORDS:
                await one.renew(record, LEASE_S)
            assert await two.watch(NAME, view.version, SHORT_S) is None

        self.run(talk)

    def test_an_unknown_instance_is_named(self) -> None:
        """In the sentence that says what is missing."""

        async def talk(one: Discovery, two: Discovery) -> None:
            error = await refused(two.watch("nobody", "", SHORT_S))
            assert error.fault is DiscoveryFault.INCOMPLETE
            assert "'nobody'" in str(error)

        self.run(talk)

    def test_a_client_tells_every_watcher_and_ends_its_thread(self) -> None:
        """Those that came before the registration, and those after it."""
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
        assert not any(map(_is_ours, set(threading.enumerate()) - before))


class DiscoverySuite(FixedCases):
    """Cases for every discovery in which ranks come and go."""

    def test_a_watch_waits_for_the_last_rank(self) -> None:
        """An instance without all of its ranks is no instance."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await one.register(RECORDS[0], LEASE_S)
            error = await refused(two.watch(NAME, "", SHORT_S))
            assert error.fault is DiscoveryFault.INCOMPLETE
            watches = [asyncio.create_task(each.watch(NAME, "", ENOUGH_S)) for each in (one, two)]
            await one.register(RECORDS[1], LEASE_S)
            assert [lives(await each) for each in watches] == [[100, 101]] * 2

        self.run(talk)

    def test_a_withdrawn_rank_is_gone(self) -> None:
        """For who watches, at once; and in the list. It may come back."""

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
        """As if the rank had been withdrawn, and then there is nothing to renew."""

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

    def test_ranks_that_disagree_are_no_instance(self) -> None:
        """Whatever they disagree in."""

        async def talk(one: Discovery, two: Discovery) -> None:
            await one.register(RECORDS[0], LEASE_S)
            await one.register(replace(RECORDS[1], fingerprint="another"), LEASE_S)
            assert (await refused(two.watch(NAME, "", SHORT_S))).fault is DiscoveryFault.INCOMPLETE

        self.run(talk)

    def test_a_client_that_closes_withdraws_its_ranks(self) -> None:
        """Whoever watches is told."""
        news: list[Future[InstanceView | None]] = [Future(), Future()]
        waiting = iter(news)
        with DiscoveryClient(self.make()) as watcher:
            watcher.watch(NAME, lambda view: next(waiting).set_result(view))
            with DiscoveryClient(self.make()) as client:
                for record in RECORDS:
                    client.register(record, LEASE_S)
                assert lives(news[0].result(ENOUGH_S)) == [100, 101]
            # One rank after the other leaves, and an instance ends once.
            assert news[1].result(ENOUGH_S) is None


async def register(discovery: Discovery) -> None:
    """Register every rank."""
    for record in RECORDS:
        await discovery.register(record, LEASE_S)


async def found(discovery: Discovery) -> InstanceView:
    """The instance, which is complete or soon will be."""
    view = await discovery.watch(NAME, "", ENOUGH_S)
    assert view is not None
    return view


async def refused(call: Awaitable[object]) -> DiscoveryError:
    """The error that a call must end in."""
    with pytest.raises(DiscoveryError) as error:
        await call
    return error.value


def lives(view: InstanceView | None) -> list[int | None]:
    """The incarnations of a view."""
    return [rank.incarnation for rank in view.ranks] if view is not None else []


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name == "kvferry-discovery-client"
