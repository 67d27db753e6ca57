"""Prefixes that a worker pulls from others, and those that it lends to them.

A pull fills the prefix cache and nothing else: its pages are its own until it has ended, and the
request that wants them is admitted afterwards and shares them. So a pull that fails, or that a
silent holder leaves unreleased, costs the request time and no page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvferry import SPAN_TOKENS, PrefixQuery, RankAgreement, Status
from kvferry.reference.engine.blocks import BlockAllocation
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.transfer.extensions import LendCommand, PullCommand
from kvferry.reference.worker.rooms import EngineRooms

# A pull that takes longer is given up: computing is the better choice then.
PULL_S = 5.0


class PrefixPulls:
    """The prefixes that travel to and from one engine's prefix cache.

    ``name`` is the worker's. Belongs to the service's event loop, between two steps; ``soon`` lets
    another thread have something done there.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        rooms: EngineRooms,
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._name = name
        self._soon = soon
        self._blocks = engine.scheduler.blocks
        self._rooms = rooms
        # Tokens whose cache has come from others, and gone to them.
        self.pulled_tokens = self.lent_tokens = 0

    def pull(
        self,
        request: EngineRequest,
        holder: str,
        deadline_s: float,
        trace: tuple[str, str],
        then: Callable[[int], None],
    ) -> None:
        """Pull what the prefix cache lacks of a prompt; then call ``then`` with its token count.

        ``then`` is called once, at once if there is nothing to pull, and soon after a failure.
        """
        blocks = self._blocks
        # Whole pages, without the last token, which is computed for its logits.
        most = (len(request.prompt) - 1) // blocks.page_tokens * blocks.page_tokens
        wanted = request.prompt[: most - most % SPAN_TOKENS]
        allocation = None
        if holder != self._name and blocks.keep:
            allocation = blocks.allocate(wanted, len(wanted), reuse=len(wanted))
        if allocation is not None and allocation.prefix == len(wanted):
            blocks.release(allocation)
            allocation = None
        if allocation is None:
            then(0)
            return
        name = f"pull-{request.id}"
        command = PullCommand(
            request=name,
            room=name,
            deadline_s=min(deadline_s, PULL_S),
            trace=trace,
            holder=holder,
            tokens=list(wanted),
            prefix=allocation.prefix,
            pages=allocation.pages,
        )
        released = partial(self._take_pulled, allocation, wanted, then)
        self._rooms.open(command, lambda _: then(0), released)

    def _take_pulled(
        self,
        allocation: BlockAllocation,
        wanted: Sequence[int],
        then: Callable[[int], None],
        agreement: RankAgreement,
    ) -> None:
        is_done, size = agreement.status is Status.DONE, self._blocks.page_tokens
        # Only whole pages can be shared.
        usable = agreement.pulled // size * size if is_done else 0
        pulled = max(0, usable - allocation.prefix)
        if pulled:
            self._blocks.publish(allocation, wanted[:usable])
            self.pulled_tokens += pulled
        self._blocks.release(allocation)
        if is_done:
            then(pulled)

    def holds(self, query: PrefixQuery) -> int:
        """Lend a prefix between two steps, and return its length. On the look-ups' thread."""
        answer: Future[int] = Future()
        self._soon(lambda: answer.set_result(self.lend(query)))
        return answer.result(query.deadline_s)

    def lend(self, query: PrefixQuery) -> int:
        """Pin the longest prefix of a query that is cached, and send it; return its length."""
        held, digest = self._blocks.hold(query.chain)
        if held.prefix <= query.prefix:
            self._blocks.release(held)
            return 0
        command = LendCommand(
            request=f"lend-{query.room}",
            room=query.room,
            deadline_s=query.deadline_s,
            digest=digest,
            trace=("", ""),
            tokens=held.prefix,
            pages=held.pages,
        )

        def released(agreement: RankAgreement) -> None:
            self._blocks.release(held)
            if agreement.status is Status.DONE:
                self.lent_tokens += held.prefix - query.prefix

        self._rooms.open(command, lambda _: None, released)
        return held.prefix
