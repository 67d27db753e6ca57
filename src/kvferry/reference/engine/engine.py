"""The engine: requests in, tokens and text out, one step at a time.

``Engine`` belongs to one thread, which calls ``step`` in a loop. It ties together
the scheduler (what runs), the ranks (who runs it) and the text of each answer.

In the role PREFILL or DECODE a request's pages are also a transfer's business.
The engine then does its half and says so; the caller moves the cache:

- PREFILL: ``Admitted``, a ``Computed`` for each chunk, then ``Produced`` with the
  first token. On every rank the extension saw the same chunks. ``release`` ends it.
- DECODE: ``Admitted`` with the pages to fill, behind a prefix that is there
  already. Then ``arrived`` (all ranks have it), ``recompute`` (do without), or
  ``cancel`` and ``release``.

A request for which no token can be chosen is cancelled, with ``SampleFailed``. Any
other exception in a step ends the engine, because its ranks may disagree from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from kvferry import DType, InputError, Order, Parallel
from kvferry.reference.engine.blocks import Blocks
from kvferry.reference.engine.cache import TORCH_DTYPES
from kvferry.reference.engine.layouts import layout_for
from kvferry.reference.engine.requests import (
    Computed,
    EngineRequest,
    EngineRole,
    FinishReason,
    Noted,
    Output,
    Produced,
)
from kvferry.reference.engine.scheduler import Active, RequestPhase, Scheduler
from kvferry.reference.engine.steps import RequestWork, Sample, StepPlan, StepResult
from kvferry.reference.engine.text import TextStream
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.ranks.processes import RankLost, Ranks
from kvferry.reference.ranks.rank import MakeExtension, RankSetup, RankWorker, no_extension


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine shards, pages and batches. ``threads`` is for each rank.

    ``step_tokens`` bounds the tokens of one step, and so the length of a chunk. The
    ranks have ``timeout_s`` to start and to hear each other. Once they run, one that is
    silent for half of ``lost_s``, or a step that takes longer than that, ends the engine.
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
    """One instance of a model on one or more ranks. Close it when done."""

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
        _demand_device(options)
        is_hybrid = self.config.linear is not None
        num_rows = options.max_requests if is_hybrid else 0
        self.scheduler = Scheduler(
            # A state is the sum of all that came before: there is none to share at a page's end.
            Blocks(
                -(-options.cache_tokens // options.page_tokens),
                options.page_tokens,
                num_rows=num_rows,
                keep=options.prefix_cache and not is_hybrid,
            ),
            step_tokens=options.step_tokens,
            max_requests=options.max_requests,
        )
        # Requests in the step that is running; after an exception, those that may have caused it.
        self.in_step: frozenset[str] = frozenset()
        self._commands: list[bytes] = []
        self._texts: dict[str, TextStream] = {}
        self._ranks = Ranks(
            RankSetup(
                folder=folder,
                config=self.config,
                layout=self.layout,
                num_pages=self.scheduler.blocks.num_pages,
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
    def worker(self) -> RankWorker:
        """Rank 0, which lives in this process."""
        return self._ranks.worker

    @property
    def figures(self) -> list[str]:
        """What ranks of other processes count, for Prometheus. For any thread."""
        return self._ranks.figures

    def on_lost(self, told: Callable[[RankLost], None]) -> None:
        """Have it told, by another thread, when a rank is silent or a step does not end."""
        self._ranks.on_lost = told

    @property
    def idle(self) -> bool:
        """Whether no request is known."""
        return not (self.scheduler.num_waiting or self.scheduler.num_active)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every rank. Idempotent."""
        self._ranks.close()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; refuses one that could never run."""
        length = request.reserved_tokens
        if length > self.config.max_tokens:
            raise InputError(
                f"prompt and max_tokens are {length} tokens and the model takes "
                f"{self.config.max_tokens}; shorten the prompt or lower max_tokens"
            )
        if not all(0 <= token < self.config.vocab for token in request.prompt):
            raise InputError(f"the prompt has token ids outside 0..{self.config.vocab - 1}")
        self.scheduler.add(request)
        self._texts[request.id] = TextStream(self.tokenizer.decode, request.stop)

    def post(self, command: bytes) -> None:
        """Send a command to every rank's extension, with the next step."""
        self._commands.append(command)

    def step(self, *, poll: bool = False) -> list[Output]:
        """Run one step, if there is work or a command; ``poll`` asks the extensions anyway."""
        outputs: list[Output] = [*self.scheduler.admit()]
        plan = StepPlan(works=self.scheduler.plan(), commands=self._commands)
        if not (plan.works or plan.commands or poll):
            return outputs
        self._commands = []
        self.in_step = frozenset(work.request for work in plan.works)
        results = self._ranks.run(plan)
        self.in_step = frozenset()
        return [*outputs, *self._settle(plan.works, results)]

    def _settle(self, works: list[RequestWork], results: list[StepResult]) -> list[Output]:
        outputs: list[Output] = []
        for work in works:
            in_prompt = self.scheduler.get(work.request).phase is RequestPhase.PREFILL
            self.scheduler.ran(work)
            if in_prompt:
                outputs.append(Computed(work.request, work.first, work.end))
        for sample in results[self.layout.lead].samples:
            self.scheduler.sampled(sample.request, sample.token)
            outputs.append(self._produce(sample))
        for failure in results[self.layout.lead].failures:
            self.cancel(failure.request)
            outputs.append(failure)
        outputs += [
            Noted(rank, note) for rank, result in enumerate(results) for note in result.notes
        ]
        return outputs

    def _produce(self, sample: Sample) -> Produced:
        """Add a token to its answer, and end the answer where it ends."""
        active = self.scheduler.get(sample.request)
        request, text = active.request, self._texts[sample.request]
        if request.role is EngineRole.PREFILL:
            return Produced(sample.request, sample)
        shown, finish = self._show(active, text, sample.token)
        if finish is not None:
            self.scheduler.finish(sample.request)
            del self._texts[sample.request]
        return Produced(sample.request, sample, shown, finish)

    def _show(
        self, active: Active, text: TextStream, token: int
    ) -> tuple[str, FinishReason | None]:
        """The text that a token brings, and whether it ends the answer. The end has no text."""
        request = active.request
        ends = () if request.ignore_end else self.config.end_tokens
        if token in (*request.stop_tokens, *ends):
            return text.end(), FinishReason.STOP
        shown = text.push(token)
        if text.stopped:
            return shown, FinishReason.STOP
        if active.num_produced >= request.max_tokens:
            shown += text.end()
            return shown, FinishReason.STOP if text.stopped else FinishReason.LENGTH
        return shown, None

    def cancel(self, request_id: str) -> bool:
        """Stop a request, if it is still known; say whether ``release`` has yet to be called."""
        pinned = self.scheduler.cancel(request_id)
        if not pinned:
            self._texts.pop(request_id, None)
        return pinned

    def release(self, request_id: str) -> None:
        """No transfer touches the request's pages any more: free them."""
        self.scheduler.release(request_id)
        del self._texts[request_id]

    def arrived(self, request_id: str, first: Sample) -> Produced:
        """The prompt's cache is in place on every rank, and this is its first token."""
        if not 0 <= first.token < self.config.vocab:
            raise InputError(f"the first token must be in 0..{self.config.vocab - 1}")
        self.scheduler.arrived(request_id, first.token)
        return self._produce(msgspec.structs.replace(first, request=request_id))

    def recompute(self, request_id: str) -> None:
        """Compute the prompt here; the transfer into its pages must be over."""
        self.scheduler.recompute(request_id)


def _demand_device(options: EngineOptions) -> None:
    if options.device == "cpu":
        return
    num_ranks, num_gpus = options.parallel.num_ranks, torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise InputError(
            f"{num_ranks} ranks need as many GPUs and there are {num_gpus}; "
            f"lower tp or use --device cpu"
        )
