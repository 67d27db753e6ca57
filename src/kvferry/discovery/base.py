"""The interface of a discovery service: ranks register, and others find their instances.

An implementation is a thin layer over one store (the built-in HTTP service, a static list, etcd).
``DiscoveryClient`` adds the thread, renewals, retries with backoff, and callbacks to any of them.
``kvferry.testing.discovery`` has the cases that every implementation passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvferry.discovery.records import InstanceView, RankRecord, Summaries


class Discovery(ABC):
    """A store in which ranks register with a lease, and instances are watched.

    **Threads.** Make the object on any thread and give it to one ``DiscoveryClient`` or endpoint,
    which closes it. All coroutines then run in the event loop of that client's thread. Several
    may run at once, and any of them may be cancelled. ``str()`` names the service.

    **Errors.** A coroutine raises ``DiscoveryError`` and nothing else. The client retries with
    backoff, so an implementation does not. The message ends in a remedy.

    **What a view proves.** A registration that was withdrawn, or whose lease has ended, disappears
    from later answers. That is a reason to probe the rank, never a proof that it is dead: no
    memory is released because of what a discovery service says.
    """

    @property
    def status_url(self) -> str:
        """URL that takes endpoints' reports; empty if a status service may register for that."""
        return ""

    def check(self, record: RankRecord) -> None:  # noqa: B027 - optional
        """Raise ``InputError`` if a rank can be refused without asking the service.

        Called on the registering thread before anything else, so it must be fast.
        """

    @abstractmethod
    async def register(self, record: RankRecord, lease_s: float) -> None:
        """Register a rank for ``lease_s``, replacing any other incarnation of it."""

    @abstractmethod
    async def renew(self, record: RankRecord, lease_s: float) -> float:
        """Extend a registration to ``lease_s`` from now; return when to renew it next, in seconds.

        A service with many ranks may grant a longer lease, to be renewed less often. Raises
        ``NO_LEASE`` if the rank is not registered, and the client registers it again. Raises
        ``REPLACED`` if another incarnation is registered.
        """

    @abstractmethod
    async def withdraw(self, record: RankRecord) -> None:
        """End a registration now. Raises as ``renew`` does."""

    @abstractmethod
    async def watch(self, name: str, version: str, wait_s: float) -> InstanceView | None:
        """Return the view of an instance once its version differs from the caller's.

        ``version`` is that of the caller's view, empty if it has none. Returns None if nothing
        changed within ``wait_s``. Only a complete instance has a view: every rank of its layout
        is registered, and all agree. For any other, raises ``INCOMPLETE`` with a sentence that
        says what is missing: at once if the caller has a view, else after ``wait_s``.
        """

    @abstractmethod
    async def list(self) -> Summaries:
        """Return a line for each instance that has any rank registered."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Close connections. The client has withdrawn its registrations before."""
