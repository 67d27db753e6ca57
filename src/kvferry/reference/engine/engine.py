"""The engine: requests in, tokens and text out, one step at a time.

``Engine`` belongs to one thread, which calls ``step`` in a loop. In the roles PREFILL and
DECODE the engine computes one half of a request, and the caller moves the cache:

- PREFILL: ``Admitted``, then ``Produced`` with the first token. Each rank's extension saw every
  chunk. ``scheduler.release`` ends the request.
- DECODE: ``Admitted`` with the pages to fill after the cached prefix. Then the caller calls
  ``arrived`` (all ranks have it), or of the scheduler ``cancel`` and ``release``.

A request whose token cannot be sampled is cancelled, with ``SampleFailed``. Any other
exception in a step ends the engine, because its ranks may disagree from then on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from kvferry import InputError, prefix_chain
from kvferry.reference.engine.blocks import Blocks
from kvferry.reference.engine.requests import (
    EngineRequest,
    EngineRole,
    FinishReason,
    Noted,
    Output,
    Produced,
    RequestWork,
    Sample,
    SampleFailed,
    StepPlan,
    StepResult,
)
from kvferry.reference.engine.scheduler import Active, Scheduler
from kvferry.reference.models.config import ModelConfig
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.options import EngineOptions
from kvferry.reference.ranks.processes import Ranks
from kvferry.reference.ranks.rank import Extension, MakeExtension, RankSetup


class Engine:
    """One instance of a model on one or more ranks; close it when done."""

    def __init__(
        self,
        folder: Path,
        options: EngineOptions | None = None,
        *,
        extend: MakeExtension = Extension,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.config = ModelConfig.load(folder)
        self.tokenizer = Tokenizer.load(folder)
        self.layout = options.layout(self.config)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise InputError("torch finds no GPU here; use --device cpu")
        blocks = Blocks(
            -(-options.cache_tokens // options.page),
            options.page,
            keep=options.prefix_cache,
            chain_of=lambda tokens: prefix_chain(
                tokens, model=self.model, dtype=str(options.dtype)
            ),
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
        self.ranks = Ranks(RankSetup(folder, options, blocks.num_pages, extend))

    @property
    def model(self) -> str:
        """Fingerprint that instances must share for their digests to be equal."""
        return self.ranks.worker.extension.model

    @property
    def idle(self) -> bool:
        """Whether the engine has no request."""
        return not (self.scheduler.waiting or self.scheduler.active)

    @property
    def max_tokens(self) -> int:
        """The longest prompt with its answer, by the model's context and by the cache."""
        blocks = self.scheduler.blocks
        return min(self.config.max_tokens, blocks.num_pages * blocks.page_tokens)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank. Idempotent."""
        self.ranks.close()

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never run."""
        if request.reserved_tokens > self.max_tokens:
            raise InputError(
                f"prompt and max_tokens are {request.reserved_tokens} tokens, and the model's "
                f"context and the cache hold {self.max_tokens}; lower one of them"
            )
        if not all(0 <= token < self.config.vocab for token in request.prompt):
            raise InputError(f"the prompt has token ids outside 0..{self.config.vocab - 1}")

    def add(self, request: EngineRequest) -> None:
        """Check a request and queue it."""
        self.check(request)
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
        for work in works:
            self.scheduler.ran(work)
        # Notes come before tokens: a token is no answer if its room was refused in the same step.
        outputs: list[Output] = [
            Noted(rank, note) for rank, result in enumerate(results) for note in result.notes
        ]
        # Only rank 0 samples.
        outputs += map(self._produce, results[0].samples)
        sampled = {sample.request for sample in results[0].samples}
        for work in works:
            if work.sampling and work.request not in sampled:
                self.scheduler.cancel(work.request)
                outputs.append(SampleFailed(work.request))
        return outputs

    def _produce(self, sample: Sample) -> Produced:
        """Add a token to its answer, and finish the answer if the token ends it."""
        active = self.scheduler.sampled(sample.request, sample.token)
        if active.request.role is EngineRole.PREFILL:
            return Produced(sample.request, sample, finish="length")
        shown, finish = self._show(active, sample.token)
        if finish is not None:
            self.scheduler.finish(active)
        return Produced(sample.request, sample, shown, finish)

    def _show(self, active: Active, token: int) -> tuple[str, FinishReason | None]:
        text = active.text
        if token in self.config.end_tokens and not active.request.ignore_end:
            return text.end(), "stop"
        shown = text.push(token)
        if text.stopped:
            return shown, "stop"
        if len(active.tokens) - len(active.request.prompt) >= active.request.max_tokens:
            shown += text.end()
            return shown, "stop" if text.stopped else "length"
        return shown, None

    def arrived(self, request_id: str, first: Sample) -> Produced:
        """Begin to decode: every rank has the prompt's cache; ``first`` is the first token."""
        if not 0 <= first.token < self.config.vocab:
            raise InputError(f"the first token must be in 0..{self.config.vocab - 1}")
        self.scheduler.arrived(request_id)
        return self._produce(msgspec.structs.replace(first, request=request_id))
