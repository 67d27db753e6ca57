"""The credit book: each slot is in one place, serials are unique, no account starves."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.ids import Serial, SlotIndex
from kvferry.protocol.credits import AccountKey, CreditBook

NUM_SLOTS, WINDOW = 4, 2
keys = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 1))


class Books(RuleBasedStateMachine):
    """Two sources in each of three rooms, compared with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CreditBook(NUM_SLOTS, WINDOW)
        self.wanted: dict[AccountKey, int] = {}
        self.held: dict[AccountKey, dict[Serial, SlotIndex]] = {}
        self.seen: dict[AccountKey, set[Serial]] = {}
        self.scattering: set[SlotIndex] = set()

    @rule(key=keys, total=st.integers(0, 6))
    def want(self, key: AccountKey, total: int) -> None:
        self.book.want(key, total)
        self.wanted[key] = max(total, self.wanted.get(key, 0))
        self.held.setdefault(key, {})
        self.seen.setdefault(key, set())

    @rule()
    def grant(self) -> None:
        lucky = self.book.grant()
        for key in lucky:
            new = dict(self.book.outstanding(key).items() - self.held[key].items())
            assert new
            assert not new.keys() & self.seen[key], "a serial is granted once"
            assert not set(new.values()) & self.busy(), "a slot is promised once"
            self.seen[key] |= new.keys()
            self.held[key] |= new
        for key, wanted in self.wanted.items():
            waits = len(self.seen[key]) < wanted and len(self.held[key]) < WINDOW
            assert not waits or not self.book.free, "a slot is free and somebody wants it"

    def busy(self) -> set[SlotIndex]:
        return self.scattering.union(*(slots.values() for slots in self.held.values()))

    @rule(key=keys, serial=st.integers(0, 7).map(Serial))
    def take(self, key: AccountKey, serial: Serial) -> None:
        slot = self.book.use(key, serial)
        assert slot == self.held.get(key, {}).pop(serial, None)
        if slot is not None:
            self.scattering.add(slot)
        assert self.book.use(key, serial) is None, "a second note is not heard"

    @rule(data=st.data())
    def scattered(self, data: st.DataObject) -> None:
        if self.scattering:
            slot = data.draw(st.sampled_from(sorted(self.scattering)))
            self.scattering.discard(slot)
            self.book.scattered(slot)

    @rule(key=keys)
    def stop(self, key: AccountKey) -> None:
        self.book.stop(key)
        if key in self.wanted:
            self.wanted[key] = len(self.seen[key])

    @rule(key=keys)
    def settle(self, key: AccountKey) -> None:
        self.book.settle(key)
        for record in (self.wanted, self.held, self.seen):
            record.pop(key, None)
        assert self.book.outstanding(key) == {}

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        self.book.check()
        assert set(self.book.scattering) == self.scattering
        for key, slots in self.held.items():
            assert self.book.outstanding(key) == slots
            assert len(slots) <= WINDOW
            assert len(self.seen[key]) <= self.wanted[key]

    def teardown(self) -> None:
        for key in list(self.held):
            self.book.settle(key)
        for slot in self.scattering:
            self.book.scattered(slot)
        assert sorted(self.book.free) == list(range(NUM_SLOTS))
        assert not self.book.accounts
        assert self.book.grant() == []


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_slots_are_granted_round_robin() -> None:
    book = CreditBook(num_slots=4, window=4)
    for name in ("a", "b", "c"):
        book.want((name, 0), 4)
    assert book.grant() == [("a", 0), ("b", 0), ("c", 0)]
    assert [len(book.outstanding((name, 0))) for name in "abc"] == [2, 1, 1]


def test_each_source_gets_its_share() -> None:
    book = CreditBook(num_slots=7, window=4)
    for source in range(4):
        book.want(("a", source), 9, sharers=4)
        book.grant()
    assert [len(book.outstanding(("a", source))) for source in range(4)] == [2, 2, 2, 1]
    book.want(("b", 0), 9)
    assert book.grant() == []


def test_late_room_is_not_starved() -> None:
    book = CreditBook(num_slots=2, window=8)
    book.want(("greedy", 0), 1000)
    book.grant()
    book.want(("late", 0), 1)
    slot = book.use(("greedy", 0), Serial(0))
    assert slot is not None
    book.scattered(slot)
    book.grant()
    book.want(("greedy", 0), 2000)
    slot = book.use(("greedy", 0), min(book.outstanding(("greedy", 0))))
    assert slot is not None
    book.scattered(slot)
    book.grant()
    assert book.outstanding(("late", 0)), "it waited for at most one turn of each other account"


def test_repeated_want_changes_nothing() -> None:
    book = CreditBook(num_slots=4, window=4)
    for total in (2, 2, 1):
        book.want(("a", 0), total)
        book.grant()
    assert set(book.outstanding(("a", 0))) == {0, 1}
