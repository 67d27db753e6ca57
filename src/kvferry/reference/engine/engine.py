"""The engine: requests in, tokens and text out, one step at a time.

``Engine`` belongs to one thread, which calls ``step`` in a loop. In the roles PREFILL and
DECODE the engine computes one half of a request, and the caller moves the cache:

- PREFILL: ``Admitted``, a ``Computed`` per chunk, then ``Produced`` with the first token.
  Each rank's extension saw the same chunks. ``scheduler.release`` ends the request.
- DECODE: ``Admitted`` with the pages to fill after the cached prefix. Then the caller calls
  ``arrived`` (all ranks have it), or of the scheduler ``recompute`` (do without), or ``cancel``
  and ``release``.

A request whose token cannot be sampled is cancelled, with ``SampleFailed``. Any other
exception in a step ends the engine, because its ranks may disagree from then on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from kvferry import DType, InputError, Order, Parallel
from kvferry.reference.engine.blocks import Blocks
from kvferry.reference.engine.cache import TORCH_DTYPES
from kvferry.reference.engine.requests import (
    Computed,
    EngineRequest,
    EngineRole,
    FinishReason,
    Noted,
    Output,
    Produced,
    RequestWork,
    Sample,
    StepPlan,
    StepResult,
)
from kvferry.reference.engine.scheduler import Active, RequestPhase, Scheduler
from kvferry.reference.models.config import ModelConfig, layout_for
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.ranks.processes import Ranks
from kvferry.reference.ranks.rank import MakeExtension, RankSetup, no_extension


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine shards, pages and batches. ``threads`` is per rank.

    ``step_tokens`` bounds the tokens of one step, and so the length of a chunk. Ranks have
    ``timeout_s`` to start; a step in which a rank does not answer for ``lost_s`` ends the engine.
    """

    parallel: Parallel = Parallel()
    page_tokens: int = 16
    order: Order = Order.NHD
    dtype: DType = DType.FLOAT32
    device: str = "cpu"
    cache_tokens: int = 8192
    max_requests: int = 32
    step_tokens: int = 256
    prefix_cache: bool = True
    threads: int = 1
    timeout_s: float = 120.0
    lost_s: float = 20.0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device is cpu or cuda, not {self.device!r}")
        if self.dtype not in TORCH_DTYPES:
            raise InputError(f"this engine computes in {', '.join(TORCH_DTYPES)}, not {self.dtype}")
        for name in ("page_tokens", "cache_tokens", "max_requests", "step_tokens", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lost_s <= 0:
            raise InputError(f"lost_s must be above 0, not {self.lost_s:g}")


class Engine:
    """One instance of a model on one or more ranks; close it when done."""

    def __init__(
        self,
        folder: Path,
        options: EngineOptions | None = None,
        *,
        extend: MakeExtension = no_extension,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.config = ModelConfig.load(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.layout = layout_for(
            self.config,
            options.parallel,
            page_tokens=options.page_tokens,
            order=options.order,
            dtype=options.dtype,
        )
        _demand_gpus(options)
        is_hybrid = self.config.is_hybrid
        num_rows = options.max_requests if is_hybrid else 0
        blocks = Blocks(
            -(-options.cache_tokens // options.page_tokens),
            options.page_tokens,
            num_rows=num_rows,
            # A recurrent state covers all tokens before it, so no page boundary can be shared.
            keep=options.prefix_cache and not is_hybrid,
        )
        self.scheduler = Scheduler(
            blocks,
            self.tokenizer.decode,
            step_tokens=options.step_tokens,
            max_requests=options.max_requests,
        )
        # Requests in the running step; after an exception, those that may have caused it.
        self.in_step: frozenset[str] = frozenset()
        self._commands: list[bytes] = []
        self.ranks = Ranks(
            RankSetup(
                folder=folder,
                config=self.config,
                layout=self.layout,
                num_pages=blocks.num_pages,
                num_rows=num_rows,
                device=options.device,
                dtype=TORCH_DTYPES[options.dtype],
                threads=options.threads,
                timeout_s=options.timeout_s,
                lost_s=options.lost_s,
                extend=extend,
            )
        )

    @property
    def idle(self) -> bool:
        """Whether the engine has no request."""
        return not (self.scheduler.num_waiting or self.scheduler.num_active)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank. Idempotent."""
        self.ranks.close()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; refuse one that can never run."""
        blocks = self.scheduler.blocks
        limits = {
            "the model takes": self.config.max_tokens,
            "the cache holds": blocks.num_pages * blocks.page_tokens,
        }
        for limit, most in limits.items():
            if request.reserved_tokens > most:
                raise InputError(
                    f"prompt and max_tokens are {request.reserved_tokens} tokens and {limit} "
                    f"{most}; shorten the prompt or lower max_tokens"
                )
        if not all(0 <= token < self.config.vocab for token in request.prompt):
            raise InputError(f"the prompt has token ids outside 0..{self.config.vocab - 1}")
        self.scheduler.add(request)

    def post(self, command: bytes) -> None:
        """Send a command to every rank's extension with the next step."""
        self._commands.append(command)

    def step(self, *, poll: bool = False) -> list[Output]:
        """Run one step if there is work or a command; ``poll`` asks the extensions anyway."""
        outputs: list[Output] = [*self.scheduler.admit()]
        plan = StepPlan(works=self.scheduler.plan(), commands=self._commands)
        if not (plan.works or plan.commands or poll):
            return outputs
        self._commands = []
        self.in_step = frozenset(work.request for work in plan.works)
        results = self.ranks.run(plan)
        self.in_step = frozenset()
        return [*outputs, *self._outputs(plan.works, results)]

    def _outputs(self, works: list[RequestWork], results: list[StepResult]) -> list[Output]:
        outputs: list[Output] = []
        for work in works:
            in_prompt = self.scheduler.get(work.request).phase is RequestPhase.PREFILL
            self.scheduler.ran(work)
            if in_prompt:
                outputs.append(Computed(work.request, work.first, work.end))
        lead = results[self.layout.lead]
        for sample in lead.samples:
            self.scheduler.sampled(sample.request, sample.token)
            outputs.append(self._produce(sample))
        for failure in lead.failures:
            self.scheduler.cancel(failure.request)
            outputs.append(failure)
        outputs += [
            Noted(rank, note) for rank, result in enumerate(results) for note in result.notes
        ]
        return outputs

    def _produce(self, sample: Sample) -> Produced:
        """Add a token to its answer, and finish the answer if the token ends it."""
        active = self.scheduler.get(sample.request)
        if active.request.role is EngineRole.PREFILL:
            return Produced(sample.request, sample, finish=FinishReason.LENGTH)
        shown, finish = self._show(active, sample.token)
        if finish is not None:
            self.scheduler.finish(active)
        return Produced(sample.request, sample, shown, finish)

    def _show(self, active: Active, token: int) -> tuple[str, FinishReason | None]:
        text = active.text
        if token in self.config.end_tokens and not active.request.ignore_end:
            return text.end(), FinishReason.STOP
        shown = text.push(token)
        if text.stopped:
            return shown, FinishReason.STOP
        if active.num_produced >= active.request.max_tokens:
            shown += text.end()
            return shown, FinishReason.STOP if text.stopped else FinishReason.LENGTH
        return shown, None

    def arrived(self, request_id: str, first: Sample) -> Produced:
        """Begin to decode: every rank has the prompt's cache; ``first`` is the first token."""
        if not 0 <= first.token < self.config.vocab:
            raise InputError(f"the first token must be in 0..{self.config.vocab - 1}")
        self.scheduler.arrived(request_id, first.token)
        return self._produce(msgspec.structs.replace(first, request=request_id))


def _demand_gpus(options: EngineOptions) -> None:
    if options.device == "cpu":
        return
    num_ranks, num_gpus = options.parallel.num_ranks, torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise InputError(
            f"{num_ranks} ranks need as many GPUs and there are {num_gpus}; "
            f"lower tp or use --device cpu"
        )
