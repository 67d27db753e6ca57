"""The scheduler: which tokens run in the next step. Pure: no tensors, processes or clocks.

A request is admitted when pages for its prompt and its longest answer are there,
so nothing that runs is ever preempted. In each step every decoding request runs
one token, and prompts fill up what is left of the step's budget, in the order
they came, in chunks that end where a page does.

    WAITING ── admit ──▶ PREFILL ── last chunk ──▶ DECODE ── finish ──▶ (gone)
       ▲                    │ (role PREFILL)         ▲
       │                    ▼                        │
       │                   HELD ── release ──▶ (gone)│
       └─ recompute ── ARRIVING ── arrived ──────────┘
                       (role DECODE)

Pages that a transfer may touch (HELD, ARRIVING, and PREFILL in the role of that
name) are given back by ``release`` alone; ``cancel`` only stops the work on them.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from msgspec.structs import replace

from kvferry import InputError, Misuse
from kvferry.reference.engine.blocks import BlockAllocation, Blocks
from kvferry.reference.engine.requests import Admitted, EngineRequest, EngineRole
from kvferry.reference.engine.steps import Past, RequestWork


class RequestPhase(Enum):
    """Where an admitted request stands."""

    PREFILL = auto()
    DECODE = auto()
    HELD = auto()
    ARRIVING = auto()


class Active:
    """A request with pages. ``computed`` tokens have their entries in them."""

    def __init__(self, request: EngineRequest, allocation: BlockAllocation) -> None:
        self.request = request
        self.allocation = allocation
        self.tokens = list(request.prompt)
        self.computed = allocation.prefix
        self.phase = (
            RequestPhase.ARRIVING if request.role is EngineRole.DECODE else RequestPhase.PREFILL
        )

    @property
    def pinned(self) -> bool:
        """Whether a transfer may read or write the pages."""
        waits = self.phase in (RequestPhase.ARRIVING, RequestPhase.HELD)
        return waits or self.request.role is EngineRole.PREFILL

    @property
    def num_produced(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def past(self) -> Past:
        """All tokens so far."""
        num_prompt = len(self.request.prompt)
        return Past(self.tokens[:num_prompt], self.tokens[num_prompt:])

    def __repr__(self) -> str:
        return f"<{self.request.id} {self.phase.name} {self.computed}/{len(self.tokens)}>"


class Scheduler:
    """The queue, the admitted requests and their pages."""

    def __init__(self, blocks: Blocks, *, step_tokens: int, max_requests: int) -> None:
        if step_tokens < max_requests + blocks.page_tokens:
            raise InputError(
                f"step_tokens={step_tokens} must be at least max_requests + page_tokens = "
                f"{max_requests + blocks.page_tokens}, or prompts could wait for ever"
            )
        self.blocks = blocks
        self._step_tokens = step_tokens
        self._max_requests = max_requests
        self._waiting: deque[EngineRequest] = deque()
        self._active: dict[str, Active] = {}

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Requests with pages."""
        return len(self._active)

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue."""
        if request.id in self._active or any(r.id == request.id for r in self._waiting):
            raise InputError(f"request {request.id!r} is known already; give it another id")
        if self.blocks.pages_for(request.reserved_tokens) > self.blocks.num_pages:
            capacity = self.blocks.num_pages * self.blocks.page_tokens
            raise InputError(
                f"prompt and max_tokens are {request.reserved_tokens} tokens and the cache holds "
                f"{capacity}; shorten the prompt, lower max_tokens or enlarge the cache"
            )
        self._waiting.append(request)

    def get(self, request_id: str) -> Active:
        """An admitted request."""
        if request_id not in self._active:
            raise Misuse(f"request {request_id!r} has no pages; it ended or still waits")
        return self._active[request_id]

    def admit(self) -> list[Admitted]:
        """Give pages to waiting requests, in order, as long as there are enough."""
        admitted = []
        while self._waiting and len(self._active) < self._max_requests:
            request = self._waiting[0]
            # Someone has to compute the last token for its logits; in decode others did.
            reuse = len(request.prompt) - (request.role is not EngineRole.DECODE)
            allocation = self.blocks.allocate(request.prompt, request.reserved_tokens, reuse)
            if allocation is None:
                break
            self._waiting.popleft()
            self._active[request.id] = Active(request, allocation)
            pages, row, prefix = allocation.pages, allocation.row, allocation.prefix
            admitted.append(Admitted(request.id, pages, row, prefix))
        return admitted

    def plan(self) -> list[RequestWork]:
        """The next step's work; empty where nothing can run."""
        works = [
            self._work(active, 1)
            for active in self._active.values()
            if active.phase is RequestPhase.DECODE
        ]
        budget = self._step_tokens - len(works)
        for active in self._active.values():
            if active.phase is not RequestPhase.PREFILL:
                continue
            size = self._chunk(active, budget)
            if not size:
                break
            works.append(self._work(active, size))
            budget -= size
        return works

    def _chunk(self, active: Active, budget: int) -> int:
        left = len(active.tokens) - active.computed
        if left <= budget:
            return left
        return max(0, budget - (active.computed + budget) % self.blocks.page_tokens)

    def _work(self, active: Active, size: int) -> RequestWork:
        end = active.computed + size
        sampling = active.request.sampling if end == len(active.tokens) else None
        return RequestWork(
            request=active.request.id,
            tokens=active.tokens[active.computed : end],
            first=active.computed,
            pages=active.allocation.pages[: self.blocks.pages_for(end)],
            row=active.allocation.row,
            sampling=sampling,
            past=active.past if sampling is not None and sampling.looks_back else None,
        )

    def ran(self, work: RequestWork) -> None:
        """The work's entries are in the pages."""
        active = self.get(work.request)
        active.computed = work.end
        self.blocks.publish(active.allocation, active.tokens[: work.end])

    def sampled(self, request_id: str, token: int) -> None:
        """The request's next token is known."""
        active = self.get(request_id)
        active.tokens.append(token)
        if active.phase is RequestPhase.PREFILL:
            is_half = active.request.role is EngineRole.PREFILL
            active.phase = RequestPhase.HELD if is_half else RequestPhase.DECODE

    def arrived(self, request_id: str, first_token: int) -> None:
        """The prompt's cache is in the pages, on every rank; decoding can begin."""
        active = self._demand(request_id, RequestPhase.ARRIVING)
        active.computed = len(active.request.prompt)
        active.tokens.append(first_token)
        active.phase = RequestPhase.DECODE
        self.blocks.publish(active.allocation, active.request.prompt)

    def recompute(self, request_id: str) -> None:
        """Give up on a transfer that touches the pages no more: compute the prompt here."""
        active = self._demand(request_id, RequestPhase.ARRIVING)
        self._drop(active)
        self._waiting.appendleft(replace(active.request, role=EngineRole.WHOLE))

    def finish(self, request_id: str) -> None:
        """The request has its answer."""
        self._drop(self.get(request_id))

    def cancel(self, request_id: str) -> bool:
        """Stop a request, if it is still known; say whether ``release`` has yet to be called."""
        self._waiting = deque(r for r in self._waiting if r.id != request_id)
        active = self._active.get(request_id)
        if active is None:
            return False
        if not active.pinned:
            self._drop(active)
            return False
        active.phase = RequestPhase.HELD
        return True

    def release(self, request_id: str) -> None:
        """No transfer touches the pages any more: free them."""
        active = self.get(request_id)
        if not active.pinned:
            raise Misuse(f"request {request_id!r} is still being computed; cancel it")
        self._drop(active)

    def _demand(self, request_id: str, phase: RequestPhase) -> Active:
        active = self.get(request_id)
        if active.phase is not phase:
            raise Misuse(f"request {request_id!r} is {active.phase.name}, not {phase.name}")
        return active

    def _drop(self, active: Active) -> None:
        del self._active[active.request.id]
        self.blocks.release(active.allocation)
