"""The registry alone: leases, restarts, and views that never mix two sets of ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from discovery.parts import layout, record
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    RankView,
)
from kvferry.discovery.registry import MAX_RENEWALS_PER_S, InstanceRegistry
from kvferry.errors import InputError
from kvferry.layout import Layout

LEASE_S = 10.0


@pytest.fixture
def registry() -> InstanceRegistry:
    return InstanceRegistry("e")


def complete(registry: InstanceRegistry, name: str = "p", now: float = 0.0) -> InstanceView:
    for rank in (0, 1):
        registry.register(record(name, rank, 1 + rank), now, LEASE_S)
    view = registry.resolve(name)
    assert view is not None
    return view


def fault(error: pytest.ExceptionInfo[DiscoveryError]) -> DiscoveryFault:
    return error.value.fault


def test_an_instance_is_complete_with_its_last_rank(registry: InstanceRegistry) -> None:
    assert registry.register(record(rank=1, incarnation=2), 0, LEASE_S) is False
    assert registry.resolve("p") is None
    assert "waits for rank 0 of 2" in registry.explain("p")
    assert registry.register(record(rank=0), 0, LEASE_S) is True
    view = registry.resolve("p")
    assert view == InstanceView(
        "p",
        "e.1",
        "model",
        layout(tp=2),
        "shm",
        (RankView(0, 1, "tcp://127.0.0.1:5000"), RankView(1, 2, "tcp://127.0.0.1:5001")),
    )
    assert registry.explain("p") == "'p' is complete"


def test_registering_the_same_record_again_changes_nothing(registry: InstanceRegistry) -> None:
    view = complete(registry)
    assert registry.register(record(rank=0), 5, LEASE_S) is False
    assert registry.resolve("p") is view
    assert registry.num_records == 2


def test_many_ranks_get_longer_leases(registry: InstanceRegistry) -> None:
    """So that the rate of renewals, three in a lease, has a bound."""
    complete(registry)
    assert registry.granted_s(LEASE_S) == LEASE_S
    registry.num_records = 16_000
    granted_s = registry.granted_s(LEASE_S)
    assert granted_s > LEASE_S
    assert registry.num_records / (granted_s / 3) == pytest.approx(MAX_RENEWALS_PER_S)
    assert registry.granted_s(300.0) == 300.0


def test_the_revision_changes_with_the_list_only(registry: InstanceRegistry) -> None:
    complete(registry)
    before = registry.revision
    registry.renew("p", 0, 1, 1.0, LEASE_S)
    registry.expire(2.0)
    assert registry.revision == before
    registry.withdraw("p", 0, 1)
    assert registry.revision > before
    before = registry.revision
    registry.expire(100.0)
    assert registry.revision > before


def test_a_new_incarnation_replaces_the_old_one_at_once(registry: InstanceRegistry) -> None:
    before = complete(registry)
    assert registry.register(record(rank=0, incarnation=9), 1, LEASE_S) is True
    after = registry.resolve("p")
    assert after is not None
    assert after.version != before.version
    assert [view.incarnation for view in after.ranks] == [9, 2]
    with pytest.raises(DiscoveryError, match="another process has registered") as error:
        registry.renew("p", 0, 1, 2, LEASE_S)
    assert fault(error) is DiscoveryFault.REPLACED
    with pytest.raises(DiscoveryError) as error:
        registry.withdraw("p", 0, 1)
    assert fault(error) is DiscoveryFault.REPLACED
    assert registry.resolve("p") is after


def test_a_lease_ends_unless_it_is_renewed(registry: InstanceRegistry) -> None:
    complete(registry)
    registry.renew("p", 0, 1, 6, LEASE_S)
    assert registry.expire(9.9) == []
    assert registry.resolve("p") is not None
    assert registry.expire(10) == [("p", 1)]
    assert registry.resolve("p") is None
    with pytest.raises(DiscoveryError) as error:
        registry.renew("p", 1, 2, 10, LEASE_S)
    assert fault(error) is DiscoveryFault.NO_LEASE
    assert registry.expire(16) == [("p", 0)]
    assert (registry.num_records, registry.num_instances) == (0, 0)
    assert "nobody has registered as 'p'" in registry.explain("p")


def test_a_rank_that_returns_gives_a_new_version(registry: InstanceRegistry) -> None:
    first = complete(registry)
    registry.expire(100)
    again = complete(registry, now=100)
    assert again.same_as(first)
    assert again.version != first.version


def test_withdrawing_a_rank_ends_the_instance(registry: InstanceRegistry) -> None:
    complete(registry)
    assert registry.withdraw("p", 1, 2) is True
    assert registry.resolve("p") is None
    assert registry.withdraw("p", 0, 1) is False
    with pytest.raises(DiscoveryError) as error:
        registry.withdraw("p", 0, 1)
    assert fault(error) is DiscoveryFault.NO_LEASE


@pytest.mark.parametrize(
    "changes",
    [{"fingerprint": "other"}, {"transport": "nixl"}, {"layout": layout(tp=2, page_tokens=64)}],
)
def test_ranks_that_disagree_are_not_complete(
    registry: InstanceRegistry, changes: dict[str, Any]
) -> None:
    registry.register(record(rank=0), 0, LEASE_S)
    registry.register(record(rank=1, **changes), 0, LEASE_S)
    assert registry.resolve("p") is None
    assert "rank 1 registered with another layout" in registry.explain("p")
    summary = registry.summaries()[0]
    assert (summary.complete, summary.num_ranks, summary.registered) == (False, 2, (0, 1))


def test_a_rolling_restart_with_another_layout(registry: InstanceRegistry) -> None:
    """The instance ends with the first rank that changes and begins again with the last."""
    complete(registry)
    wide = layout(tp=4)
    seen = []
    for rank in (2, 3, 1, 0):
        registry.register(record(rank=rank, incarnation=20 + rank, layout=wide), 1, LEASE_S)
        view = registry.resolve("p")
        seen.append(view.layout.num_ranks if view else 0)
    assert seen == [2, 2, 0, 4]
    narrow = layout(tp=1)
    registry.register(record(rank=0, incarnation=30, layout=narrow), 2, LEASE_S)
    view = registry.resolve("p")
    assert view is not None
    assert [rank.incarnation for rank in view.ranks] == [30]


def test_instances_and_ranks_are_limited() -> None:
    registry = InstanceRegistry("e", max_instances=2, max_records=3)
    complete(registry, "a")
    registry.register(record("b"), 0, LEASE_S)
    for full in (record("b", 1), record("c")):
        with pytest.raises(DiscoveryError, match="use another discovery service") as error:
            registry.register(full, 0, LEASE_S)
        assert fault(error) is DiscoveryFault.FULL
    registry.withdraw("a", 1, 2)
    with pytest.raises(DiscoveryError, match="2 instances") as error:
        registry.register(record("c"), 0, LEASE_S)
    registry.register(record("b", 1), 0, LEASE_S)
    # A registered rank can always register again.
    registry.register(record("b", 1, 77), 0, LEASE_S)
    assert registry.num_complete == 1


def test_extend_all_extends_every_lease(registry: InstanceRegistry) -> None:
    complete(registry)
    registry.extend_all(100)
    assert registry.expire(109) == []
    assert len(registry.expire(110)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 2},
        {"rank": -1},
        {"incarnation": -1},
        {"incarnation": 1 << 63},
        {"instance": ""},
        {"instance": "a" * 257},
        {"instance": ".."},
        {"instance": "a\nb"},
        {"instance": "a b"},
        {"instance": "ü"},
        {"transport": "t" * 65},
        {"control": "c" * 513},
        {"fingerprint": "f" * 4097},
        {"metadata": {"k": "v" * 4097}},
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {str(n): "" for n in range(33)}},
    ],
)
def test_a_record_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    good = msgspec.to_builtins(record())
    assert msgspec.convert(good, RankRecord) == record()
    with pytest.raises((msgspec.ValidationError, InputError)):
        msgspec.convert(good | changes, RankRecord)


def test_a_view_without_every_rank_is_refused() -> None:
    view = InstanceView("p", "e.1", "m", layout(tp=1), "shm", (RankView(0, 1, "c"),))
    assert msgspec.json.decode(msgspec.json.encode(view), type=InstanceView) == view
    for ranks in ((), view.ranks * 2, (RankView(1, 1, "c"),)):
        with pytest.raises(InputError, match="every rank of its layout once"):
            msgspec.structs.replace(view, ranks=ranks)


KINDS = [
    (layout(tp=1), "model"),
    (layout(tp=2), "model"),
    (layout(tp=2), "other"),
    (layout(tp=4), "model"),
]
NAMES = st.sampled_from(["a", "b"])
RANKS = st.integers(0, 3)
LIVES = st.integers(0, 3)


class Registrations(RuleBasedStateMachine):
    """Any order of registrations, renewals, withdrawals and time, compared with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = InstanceRegistry("e")
        self.now = 0.0
        self.model: dict[tuple[str, int], tuple[RankRecord, float]] = {}
        self.versions: dict[str, InstanceView] = {}

    @rule(name=NAMES, rank=RANKS, life=LIVES, kind=st.sampled_from(KINDS), lease=st.integers(1, 5))
    def register(
        self, name: str, rank: int, life: int, kind: tuple[Layout, str], lease: int
    ) -> None:
        held, fingerprint = kind
        if rank < held.num_ranks:
            one = record(name, rank, life, layout=held, fingerprint=fingerprint)
            self.registry.register(one, self.now, lease)
            self.model[name, rank] = (one, self.now + lease)

    @rule(name=NAMES, rank=RANKS, life=LIVES, lease=st.integers(1, 5))
    def renew(self, name: str, rank: int, life: int, lease: int) -> None:
        known = self.model.get((name, rank))
        if known is not None and known[0].incarnation == life:
            self.registry.renew(name, rank, life, self.now, lease)
            self.model[name, rank] = (known[0], self.now + lease)
        else:
            with pytest.raises(DiscoveryError) as error:
                self.registry.renew(name, rank, life, self.now, lease)
            assert fault(error) is (DiscoveryFault.REPLACED if known else DiscoveryFault.NO_LEASE)

    @rule(name=NAMES, rank=RANKS, life=LIVES)
    def leave(self, name: str, rank: int, life: int) -> None:
        known = self.model.get((name, rank))
        if known is not None and known[0].incarnation == life:
            self.registry.withdraw(name, rank, life)
            del self.model[name, rank]

    @rule(seconds=st.integers(0, 4))
    def advance_time(self, seconds: int) -> None:
        self.now += seconds
        ended = {place for place, (_, until) in self.model.items() if until <= self.now}
        assert set(self.registry.expire(self.now)) == ended
        for place in ended:
            del self.model[place]

    @invariant()
    def views_are_complete_and_never_mixed(self) -> None:
        for name in ("a", "b"):
            records = {rank: one for (n, rank), (one, _) in self.model.items() if n == name}
            view = self.registry.resolve(name)
            sets = [
                [r for r, one in records.items() if one.agrees_with(first)]
                for first in records.values()
                if first.rank == 0
            ]
            whole = bool(sets) and len(sets[0]) == records[0].layout.num_ranks
            assert (view is not None) == whole
            if view is not None:
                for rank in view.ranks:
                    one = records[rank.rank]
                    kind = (one.layout, one.fingerprint, one.transport)
                    assert kind == (view.layout, view.fingerprint, view.transport)
                    assert rank.incarnation == one.incarnation
                # A version is one state of one instance for ever.
                assert self.versions.setdefault(view.version, view) == view

    @invariant()
    def counts_are_right(self) -> None:
        assert self.registry.num_records == len(self.model)
        assert self.registry.num_instances == len({name for name, _ in self.model})
        assert self.registry.num_complete == sum(s.complete for s in self.registry.summaries())


TestRegistrations = Registrations.TestCase
TestRegistrations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
