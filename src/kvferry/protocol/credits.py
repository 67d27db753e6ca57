"""Staging slots of one target, and the sources that may write into them.

A slot is free, granted to one account (one source in one room) as a credit with a unique serial,
or being scattered. Accounts that want more credits wait in a queue and receive one slot at a
time, so that no room starves another. A granted slot becomes free only when its data has been
scattered, or when its account is settled because the source provably writes no more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.ids import Room, Serial, SlotIndex

AccountKey = tuple[Room, int]


@dataclass(slots=True)
class Account:
    """Credits of one source in one room. At most ``window`` are outstanding at a time."""

    window: int
    wanted: int = 0
    granted: int = 0
    outstanding: dict[Serial, SlotIndex] = field(default_factory=dict)


class CreditBook:
    """Every slot of the pool, and every account that wants slots."""

    def __init__(self, num_slots: int, window: int) -> None:
        # A stack, because the slot used last is the most likely one to be in a CPU cache.
        self.free = [SlotIndex(i) for i in reversed(range(num_slots))]
        self.accounts: dict[AccountKey, Account] = {}
        self.scattering: dict[SlotIndex, AccountKey] = {}
        self._num_slots = num_slots
        self._window = window
        self._queue: OrderedDict[AccountKey, None] = OrderedDict()

    def want(self, key: AccountKey, total: int, sharers: int = 1) -> None:
        """Record that an account needs ``total`` credits over its lifetime.

        The window is the account's share of the pool among ``sharers``, the sources of its room,
        because they work in parallel. Give each source at least two slots, so that filling one
        overlaps with draining the other.
        """
        window = min(self._window, max(2, -(-self._num_slots // sharers)))
        account = self.accounts.setdefault(key, Account(window))
        account.wanted = max(account.wanted, total)
        self._enqueue(key, account)

    def grant(self) -> list[AccountKey]:
        """Grant free slots round-robin; return the accounts that received any."""
        receivers: dict[AccountKey, None] = {}
        while self.free and self._queue:
            key, _ = self._queue.popitem(last=False)
            account = self.accounts[key]
            account.outstanding[Serial(account.granted)] = self.free.pop()
            account.granted += 1
            receivers[key] = None
            self._enqueue(key, account)
        return list(receivers)

    def use(self, key: AccountKey, serial: Serial) -> SlotIndex | None:
        """Mark a credit as used and return its slot; None if it was used before."""
        account = self.accounts.get(key)
        slot = account.outstanding.pop(serial, None) if account else None
        if account and slot is not None:
            self.scattering[slot] = key
            self._enqueue(key, account)
        return slot

    def scattered(self, slot: SlotIndex) -> None:
        """Free a slot whose data has been copied out."""
        del self.scattering[slot]
        self.free.append(slot)

    def stop(self, key: AccountKey) -> None:
        """Grant an account nothing more, because its room has failed."""
        account = self.accounts.get(key)
        if account:
            account.wanted = account.granted
        self._queue.pop(key, None)

    def settle(self, key: AccountKey) -> None:
        """Close an account whose source provably writes no more, and free its slots."""
        account = self.accounts.pop(key, None)
        self._queue.pop(key, None)
        if account:
            self.free.extend(account.outstanding.values())

    def outstanding(self, key: AccountKey) -> dict[Serial, SlotIndex]:
        """Return the account's credits that were granted and not used."""
        account = self.accounts.get(key)
        return dict(account.outstanding) if account else {}

    @property
    def num_outstanding(self) -> int:
        """Number of credits that were granted and not used."""
        return sum(len(account.outstanding) for account in self.accounts.values())

    def _enqueue(self, key: AccountKey, account: Account) -> None:
        if account.granted < account.wanted and len(account.outstanding) < account.window:
            self._queue.setdefault(key)

    def check(self) -> None:
        """Check that every slot is in exactly one place."""
        granted = [s for account in self.accounts.values() for s in account.outstanding.values()]
        slots = sorted([*self.free, *granted, *self.scattering])
        assert slots == list(range(self._num_slots)), "a slot is lost or granted twice"
