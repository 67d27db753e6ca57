"""The interface of a discovery service: ranks register, and others find their instances.

An implementation is a thin layer over one store (the built-in HTTP service, a static list, etcd).
``DiscoveryClient`` does the rest for all of them: the thread, renewals, retries with backoff,
and callbacks. ``kvferry.testing.discovery`` has the cases that every implementation passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvferry.discovery.records import InstanceView, RankRecord, Summaries


class Discovery(ABC):
    """A store in which ranks register with a lease, and instances are watched.

    **Threads.** Make the object on any thread and give it to one ``DiscoveryClient`` or endpoint,
    which closes it. All coroutines then run in the event loop of that client's thread. Several
    may be under way at once, and any of them may be cancelled. ``str()`` says where it is.

    **Errors.** A coroutine raises ``DiscoveryError`` and nothing else. The client tries again
    with backoff, so an implementation does not retry. Its message says what to do.

    **What a view proves.** A registration that was withdrawn, or whose lease has ended, is gone
    from later answers. That is a reason to ask whether the rank is alive, and never a proof that
    it is dead: no memory is released because of anything that a discovery says.
    """

    def check(self, record: RankRecord) -> None:  # noqa: B027 - optional
        """Raise ``InputError`` if it is known without asking that a rank can't register.

        Called on the thread that registers, before anything else, so it must be quick.
        """

    @abstractmethod
    async def register(self, record: RankRecord, lease_s: float) -> None:
        """Register a rank for ``lease_s``, in place of any other incarnation of it."""

    @abstractmethod
    async def renew(self, record: RankRecord, lease_s: float) -> None:
        """Prolong a registration to ``lease_s`` from now.

        Raises ``Fault.NO_LEASE`` if the rank is not registered, on which the client registers it
        again, and ``Fault.REPLACED`` if another incarnation is.
        """

    @abstractmethod
    async def withdraw(self, record: RankRecord) -> None:
        """End a registration now. Raises as ``renew`` does if there is none of this incarnation."""

    @abstractmethod
    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """Return the view of an instance whose version is another than the caller's.

        ``version`` is that of the view the caller has; empty if it has none. None means that
        nothing changed in ``wait_s``. Only a complete instance has a view: every rank of its
        layout is registered, and all agree. For any other, ``Fault.INCOMPLETE`` is raised with a
        sentence that says what is missing: at once if the caller has a view, which has ended,
        else after ``wait_s``.
        """

    @abstractmethod
    async def list(self) -> Summaries:
        """Return a line for each instance that has any rank registered."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Close connections. Registrations are withdrawn before."""
