"""Staging slots of one target, and who may write into them.

A slot is free, or promised to one account (one source in one room) under a
serial that is never used again. Accounts that want more wait in a queue and get
one slot at a time, so no room starves another. A promised slot becomes free
only when its data has been scattered or its account is settled, which takes
proof that the source will not write any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.ids import Room, Serial, SlotIndex

AccountKey = tuple[Room, int]


@dataclass(slots=True)
class Account:
    """One source's credits in one room."""

    window: int
    wanted: int = 0
    granted: int = 0
    outstanding: dict[Serial, SlotIndex] = field(default_factory=dict)


class CreditBook:
    """Every slot of the pool and every account that wants one."""

    def __init__(self, num_slots: int, window: int) -> None:
        # A stack: the slot that was used last is the one that is still in a cache.
        self.free = [SlotIndex(i) for i in reversed(range(num_slots))]
        self.accounts: dict[AccountKey, Account] = {}
        self.scattering: dict[SlotIndex, AccountKey] = {}
        self._num_slots = num_slots
        self._window = window
        self._queue: OrderedDict[AccountKey, None] = OrderedDict()

    @property
    def num_promised(self) -> int:
        """Slots that some source may be writing into."""
        return sum(len(account.outstanding) for account in self.accounts.values())

    def want(self, key: AccountKey, total: int, sharers: int = 1) -> None:
        """The account needs ``total`` credits over its life; so many of its room want some.

        Who comes first leaves the others their share, for they work side by side; but less
        than two slots are none, for one is filled while the other is emptied.
        """
        window = min(self._window, max(2, -(-self._num_slots // sharers)))
        account = self.accounts.setdefault(key, Account(window))
        account.wanted = max(account.wanted, total)
        self._enqueue(key, account)

    def grant(self) -> list[AccountKey]:
        """Promise free slots, one to each waiting account in turn. Who got any?"""
        lucky: dict[AccountKey, None] = {}
        while self.free and self._queue:
            key, _ = self._queue.popitem(last=False)
            account = self.accounts[key]
            account.outstanding[Serial(account.granted)] = self.free.pop()
            account.granted += 1
            lucky[key] = None
            self._enqueue(key, account)
        return list(lucky)

    def use(self, key: AccountKey, serial: Serial) -> SlotIndex | None:
        """The slot whose data has arrived; None if that was heard before."""
        account = self.accounts.get(key)
        slot = account.outstanding.pop(serial, None) if account else None
        if account and slot is not None:
            self.scattering[slot] = key
            self._enqueue(key, account)
        return slot

    def scattered(self, slot: SlotIndex) -> None:
        """The slot's data has been copied out."""
        del self.scattering[slot]
        self.free.append(slot)

    def stop(self, key: AccountKey) -> None:
        """Grant the account nothing more: its room has failed."""
        account = self.accounts.get(key)
        if account:
            account.wanted = account.granted
        self._queue.pop(key, None)

    def settle(self, key: AccountKey) -> None:
        """Close an account whose source provably writes no more; its slots become free."""
        account = self.accounts.pop(key, None)
        self._queue.pop(key, None)
        if account:
            self.free.extend(account.outstanding.values())

    def outstanding(self, key: AccountKey) -> dict[Serial, SlotIndex]:
        """Credits of an account that were granted and not seen used."""
        account = self.accounts.get(key)
        return dict(account.outstanding) if account else {}

    def _enqueue(self, key: AccountKey, account: Account) -> None:
        if account.granted < account.wanted and len(account.outstanding) < account.window:
            self._queue.setdefault(key)

    def check(self) -> None:
        """Every slot is in exactly one place. Called by tests after each step."""
        promised = [s for account in self.accounts.values() for s in account.outstanding.values()]
        everywhere = sorted([*self.free, *promised, *self.scattering])
        assert everywhere == list(range(self._num_slots)), "a slot is lost or promised twice"
