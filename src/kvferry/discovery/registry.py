"""The registry: ranks that are registered under a lease, and the instances that are complete.

Pure: the time is an argument, and one owner calls it.

There is one record for each rank of an instance, that of its latest incarnation. A registration
replaces the record of another incarnation, so a restarted process is accepted at once. The
replaced incarnation cannot renew, so two processes that claim one rank do not alternate.

An instance is complete when every rank of rank 0's layout is registered and agrees with rank 0 in
layout, fingerprint and transport. Each rank has one record and every complete set contains rank 0,
so two sets are never complete at once and a view never mixes them. When all ranks come back with
another layout, the instance ends with the first of them and starts again with the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvferry.discovery.records import (
    DiscoveryError,
    DiscoveryFault,
    InstanceView,
    RankRecord,
    RankView,
    Summary,
)

MAX_INSTANCES = 8192
MAX_RECORDS = 65536
SHOWN_RANKS = 8
# A renewal takes about 0.2 ms of a core. Clients renew three times in a lease.
MAX_RENEWALS_PER_S, RENEWALS_PER_LEASE = 1000, 3


@dataclass(slots=True)
class _Lease:
    record: RankRecord
    until: float


@dataclass(slots=True)
class _Instance:
    name: str
    leases: dict[int, _Lease] = field(default_factory=dict)
    view: InstanceView | None = None
    version: str = ""


class InstanceRegistry:
    """Records under leases. ``epoch`` distinguishes the versions of this registry from others'."""

    def __init__(
        self, epoch: str, max_instances: int = MAX_INSTANCES, max_records: int = MAX_RECORDS
    ) -> None:
        self.epoch = epoch
        self.num_records = 0
        # Changes with every change of what ``summaries`` returns.
        self.revision = 0
        self._max_instances = max_instances
        self._max_records = max_records
        self._instances: dict[str, _Instance] = {}
        self._changes = 0

    # ------------------------------------------------------------ calls of ranks

    def register(self, record: RankRecord, now: float, lease_s: float) -> bool:
        """Register a rank, replacing other incarnations; return whether the instance changed."""
        instance = self._instances.get(record.instance)
        known = instance is not None and record.rank in instance.leases
        if not known and self.num_records >= self._max_records:
            raise DiscoveryError(
                DiscoveryFault.FULL,
                f"{self.num_records} ranks are registered; use another discovery service",
            )
        if instance is None:
            instance = self._new_instance(record.instance)
        self.num_records += not known
        self.revision += 1
        instance.leases[record.rank] = _Lease(_with_shared_layout(instance, record), now + lease_s)
        return self._update(instance)

    def renew(self, name: str, rank: int, incarnation: int, now: float, lease_s: float) -> None:
        """Extend a lease. Raises ``DiscoveryError`` if this incarnation has none."""
        self._lease(name, rank, incarnation).until = now + lease_s

    def withdraw(self, name: str, rank: int, incarnation: int) -> bool:
        """Remove a rank; return whether the instance changed. Raises as ``renew`` does."""
        self._lease(name, rank, incarnation)
        return self._remove(self._instances[name], [rank])

    # ------------------------------------------------------------ time

    def granted_s(self, lease_s: float) -> float:
        """Return the lease to grant: so long that all ranks together renew at a bounded rate."""
        return max(lease_s, RENEWALS_PER_LEASE * self.num_records / MAX_RENEWALS_PER_S)

    def expire(self, now: float) -> list[tuple[str, int]]:
        """Remove the ranks whose leases have ended, and return them as (instance, rank)."""
        ended: list[tuple[str, int]] = []
        for instance in list(self._instances.values()):
            ranks = [rank for rank, lease in instance.leases.items() if lease.until <= now]
            if ranks:
                self._remove(instance, ranks)
                ended += [(instance.name, rank) for rank in ranks]
        return ended

    def extend_all(self, by_s: float) -> None:
        """Extend every lease, after a time in which the service could not receive renewals."""
        for instance in self._instances.values():
            for lease in instance.leases.values():
                lease.until += by_s

    # ------------------------------------------------------------ queries

    def resolve(self, name: str) -> InstanceView | None:
        """Return the view of an instance if it is complete."""
        instance = self._instances.get(name)
        return instance.view if instance else None

    def explain(self, name: str) -> str:
        """Say in one sentence what an instance lacks."""
        instance = self._instances.get(name)
        if instance is None:
            return f"nobody has registered as {name!r:.100}; check the name, or wait for it"
        present, others = _partition(instance)
        first = present[0]
        missing = sorted(set(range(first.layout.num_ranks)) - {record.rank for record in present})
        if not missing:
            return f"{name!r} is complete"
        text = f"{name!r} waits for rank {_join(missing)} of {first.layout.num_ranks}"
        if others:
            text += (
                f"; rank {_join([record.rank for record in others])} registered with another "
                f"layout, fingerprint or transport than rank {first.rank}, so start all alike"
            )
        return text

    def summaries(self) -> tuple[Summary, ...]:
        """Return a line for each instance, sorted by name."""
        return tuple(self._summary(self._instances[name]) for name in sorted(self._instances))

    @property
    def num_instances(self) -> int:
        """Number of instances with any rank."""
        return len(self._instances)

    @property
    def num_complete(self) -> int:
        """Number of complete instances."""
        return sum(instance.view is not None for instance in self._instances.values())

    # ------------------------------------------------------------ inside

    def _new_instance(self, name: str) -> _Instance:
        if len(self._instances) >= self._max_instances:
            raise DiscoveryError(
                DiscoveryFault.FULL,
                f"{self._max_instances} instances are registered; use another discovery service",
            )
        instance = self._instances[name] = _Instance(name)
        return instance

    def _lease(self, name: str, rank: int, incarnation: int) -> _Lease:
        instance = self._instances.get(name)
        lease = instance.leases.get(rank) if instance else None
        if lease is None:
            raise DiscoveryError(
                DiscoveryFault.NO_LEASE, f"{name}/{rank} is not registered; register it"
            )
        if lease.record.incarnation != incarnation:
            raise DiscoveryError(
                DiscoveryFault.REPLACED,
                f"another process has registered as {name}/{rank}; give each its own name or rank",
            )
        return lease

    def _remove(self, instance: _Instance, ranks: list[int]) -> bool:
        for rank in ranks:
            del instance.leases[rank]
        self.num_records -= len(ranks)
        self.revision += 1
        changed = self._update(instance)
        if not instance.leases:
            del self._instances[instance.name]
        return changed

    def _update(self, instance: _Instance) -> bool:
        """Recompute the view; return whether it changed. Versions are never reused."""
        view = _complete_view(instance)
        if view is None and instance.view is None:
            return False
        if view is not None and view.same_as(instance.view):
            return False
        self._changes += 1
        instance.version = f"{self.epoch}.{self._changes}"
        if view is not None:
            view = msgspec.structs.replace(view, version=instance.version)
        instance.view = view
        return True

    def _summary(self, instance: _Instance) -> Summary:
        present, _ = _partition(instance)
        first = present[0]
        return Summary(
            name=instance.name,
            complete=instance.view is not None,
            version=instance.version,
            num_ranks=first.layout.num_ranks,
            registered=tuple(sorted(instance.leases)),
            transport=first.transport,
            fingerprint=first.fingerprint,
            layout=str(first.layout),
            note=self.explain(instance.name),
        )


def _with_shared_layout(instance: _Instance, record: RankRecord) -> RankRecord:
    """Return the record with the instance's layout object if it has an equal one."""
    for lease in instance.leases.values():
        if lease.record.layout == record.layout:
            return msgspec.structs.replace(record, layout=lease.record.layout)
    return record


def _complete_view(instance: _Instance) -> InstanceView | None:
    if 0 not in instance.leases:
        return None
    first = instance.leases[0].record
    ranks = range(first.layout.num_ranks)
    if any(rank not in instance.leases for rank in ranks):
        return None
    records = [instance.leases[rank].record for rank in ranks]
    if not all(record.agrees_with(first) for record in records):
        return None
    views = tuple(
        RankView(record.rank, record.incarnation, record.control, record.metadata)
        for record in records
    )
    return InstanceView(instance.name, "", first.fingerprint, first.layout, first.transport, views)


def _partition(instance: _Instance) -> tuple[list[RankRecord], list[RankRecord]]:
    """Return the records that agree with the lowest rank's, that one first, and the others."""
    records = [instance.leases[rank].record for rank in sorted(instance.leases)]
    present = [record for record in records if record.agrees_with(records[0])]
    return present, [record for record in records if not record.agrees_with(records[0])]


def _join(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    return f"{shown}, …" if len(ranks) > SHOWN_RANKS else shown
