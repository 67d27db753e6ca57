"""The scheduler: which tokens run in the next step. Pure: no tensors, processes or clocks.

A request is admitted when there are pages for its prompt and its longest answer, so no
running request is preempted. In each step every decoding request runs one token. Prompts use
the rest of the step's budget in order of arrival, in chunks that end on a page boundary.

    WAITING ── admit ──▶ PREFILL ── last chunk ──▶ DECODE ── finish ──▶ (gone)
       │                    │ (role PREFILL)         ▲
       │                    ▼                        │
       │                   HELD ── release ──▶ (gone)│
       └── admit ──▶ ARRIVING ── arrived ────────────┘
          (role DECODE)

Only ``release`` gives back pages that a transfer may touch (HELD, ARRIVING, and all of role
PREFILL); ``cancel`` merely stops the computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvferry import InputError, Misuse
from kvferry.reference.engine.blocks import BlockAllocation, Blocks
from kvferry.reference.engine.requests import Admitted, EngineRequest, EngineRole, RequestWork
from kvferry.reference.engine.text import TextStream


class RequestPhase(Enum):
    """State of an admitted request."""

    PREFILL = auto()
    DECODE = auto()
    HELD = auto()
    ARRIVING = auto()


@dataclass(slots=True, eq=False)
class Active:
    """A request with pages, which contain its first ``computed`` tokens."""

    request: EngineRequest
    allocation: BlockAllocation
    text: TextStream
    tokens: list[int]
    computed: int
    phase: RequestPhase

    @property
    def pinned(self) -> bool:
        """Whether a transfer may read or write the pages."""
        waits = self.phase in (RequestPhase.ARRIVING, RequestPhase.HELD)
        return waits or self.request.role is EngineRole.PREFILL


class Scheduler:
    """The waiting queue, the admitted (``active``) requests, their pages and texts."""

    def __init__(
        self,
        blocks: Blocks,
        decode: Callable[[Sequence[int]], str],
        *,
        step_tokens: int,
        max_requests: int,
    ) -> None:
        least = max_requests + blocks.page_tokens
        if step_tokens < least:
            raise InputError(
                f"step_tokens={step_tokens} must be at least max_requests + page = {least}, "
                f"or prompts could wait for ever"
            )
        self.blocks = blocks
        self._decode = decode
        self._step_tokens = step_tokens
        self._max_requests = max_requests
        self.waiting: deque[EngineRequest] = deque()
        self.active: dict[str, Active] = {}

    def add(self, request: EngineRequest) -> None:
        """Append a request to the queue; its tokens must fit the cache."""
        if request.id in self.active or any(r.id == request.id for r in self.waiting):
            raise InputError(f"request {request.id!r} is known already; give it another id")
        self.waiting.append(request)

    def get(self, request_id: str) -> Active:
        """Return an admitted request."""
        if request_id not in self.active:
            raise Misuse(f"request {request_id!r} has no pages; it ended or still waits")
        return self.active[request_id]

    def admit(self) -> list[Admitted]:
        """Give pages to waiting requests, in order, while there are enough."""
        admitted = []
        while self.waiting and len(self.active) < self._max_requests:
            request = self.waiting[0]
            is_decode = request.role is EngineRole.DECODE
            # The last token must be computed for its logits; with role DECODE, prefill does that.
            reuse = len(request.prompt) - (not is_decode)
            pages = self.blocks.allocate(request.prompt, request.reserved_tokens, reuse)
            if pages is None:
                break
            self.waiting.popleft()
            text = TextStream(self._decode, request.stop)
            for token in request.prompt[request.num_asked :]:
                # The client has this text. What is held back of it comes with the next tokens.
                text.push(token)
            phase = RequestPhase.ARRIVING if is_decode else RequestPhase.PREFILL
            tokens = list(request.prompt)
            self.active[request.id] = Active(request, pages, text, tokens, pages.prefix, phase)
            admitted.append(Admitted(request.id, pages.pages, pages.prefix))
        return admitted

    def plan(self) -> list[RequestWork]:
        """Return the next step's work; empty if nothing can run."""
        active = self.active.values()
        works = [self._work(one, 1) for one in active if one.phase is RequestPhase.DECODE]
        budget = self._step_tokens - len(works)
        for one in active:
            if one.phase is not RequestPhase.PREFILL:
                continue
            size = len(one.tokens) - one.computed
            if size > budget:
                size = budget - (one.computed + budget) % self.blocks.page_tokens
            if size <= 0:
                break
            works.append(self._work(one, size))
            budget -= size
        return works

    def _work(self, active: Active, size: int) -> RequestWork:
        end = active.computed + size
        return RequestWork(
            request=active.request.id,
            tokens=active.tokens[active.computed : end],
            first=active.computed,
            pages=active.allocation.pages[: self.blocks.pages_for(end)],
            sampling=active.request.sampling if end == len(active.tokens) else None,
        )

    def ran(self, work: RequestWork) -> None:
        """Record that the work's entries are in the pages."""
        active = self.get(work.request)
        active.computed = work.end
        self.blocks.publish(active.allocation, active.tokens[: work.end])

    def sampled(self, request_id: str, token: int) -> Active:
        """Record a request's next token."""
        active = self.get(request_id)
        active.tokens.append(token)
        if active.phase is RequestPhase.PREFILL:
            is_half = active.request.role is EngineRole.PREFILL
            active.phase = RequestPhase.HELD if is_half else RequestPhase.DECODE
        return active

    def arrived(self, request_id: str) -> None:
        """Note that the prompt's cache is in the pages on every rank."""
        active = self.get(request_id)
        if active.phase is not RequestPhase.ARRIVING:
            raise Misuse(f"request {request_id!r} is {active.phase.name}, not ARRIVING")
        active.computed = len(active.request.prompt)
        active.phase = RequestPhase.DECODE
        self.blocks.publish(active.allocation, active.request.prompt)

    def finish(self, active: Active) -> None:
        """Drop a request that has its answer, and free its pages."""
        del self.active[active.request.id]
        self.blocks.release(active.allocation)

    def cancel(self, request_id: str) -> bool:
        """Stop a request if it is known; return whether ``release`` has yet to be called."""
        self.waiting = deque(r for r in self.waiting if r.id != request_id)
        active = self.active.get(request_id)
        if active is None:
            return False
        if not active.pinned:
            self.finish(active)
            return False
        active.phase = RequestPhase.HELD
        return True

    def release(self, request_id: str) -> None:
        """Free the pages of a request that no transfer touches any more."""
        active = self.get(request_id)
        if not active.pinned:
            raise Misuse(f"request {request_id!r} is still being computed; cancel it")
        self.finish(active)
