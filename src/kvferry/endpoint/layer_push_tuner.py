"""Chooses how many layers an engine pushes at a time, from the measured time of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from msgspec import Meta

from kvferry.endpoint.outgoing import Waitable
from kvferry.layout.intervals import Span
from kvferry.layout.layout import Layout
from kvferry.layout.pages import touched_pages
from kvferry.plan.cost import LinkCost
from kvferry.plan.layers import layers_per_push

# Layers per push: the best by the cost model, a fixed number, or all.
Layers = Annotated[int, Meta(ge=1)] | Literal["auto", "all"]


class TimedEvent(Waitable, Protocol):
    """A GPU event with timing, such as ``torch.cuda.Event(enable_timing=True)``."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to ``end_event``."""


class LayerTiming(NamedTuple):
    """Begin and end of one engine step: GPU events, or seconds of ``time.perf_counter``."""

    num_tokens: int
    began: TimedEvent | float
    ended: TimedEvent | float | None = None


class LayerPushTuner:
    """Chooses the layers per push for one rank. For the engine's thread only.

    ``mark`` returns the current time of the device that computes: a GPU event behind the work
    queued so far (``EventRecorder.now``), or the clock.
    """

    def __init__(
        self,
        layers: Layers,
        layout: Layout,
        rank: int,
        mark: Callable[[], TimedEvent | float] = time.perf_counter,
    ) -> None:
        self._layers = layers
        self._mark = mark
        self._page_tokens = layout.smallest_page
        spec, shards = layout.spec, layout.rank_shards(rank)
        numbers = {n for one in shards for n in spec.group(one.group).layers_in(one.layers)}
        self.first, self.end = min(numbers), max(numbers) + 1
        self.num_layers = self.end - self.first
        self._num_tensors = max(len(spec.group(one.group).tensors) for one in shards)
        self._token_bytes = max(len(one.units) * spec.group(one.group).unit_bytes for one in shards)
        # Seconds per token and layer; None before the first timed step.
        self._token_s: float | None = None
        self._timing: LayerTiming | None = None

    def begin(self, num_tokens: int) -> None:
        """Start timing a step that computes ``num_tokens`` tokens."""
        self._update()
        self._timing = LayerTiming(num_tokens, self._mark())

    def finish(self) -> None:
        """Stop timing: the step's last layer is computed, or queued on the GPU."""
        if self._timing is not None and self._timing.ended is None:
            self._timing = self._timing._replace(ended=self._mark())

    def per_push(self, num_tokens: int, num_sent: int, link_cost: LinkCost) -> int:
        """Return the layers per push of a step.

        ``num_tokens``: tokens that the step computes. ``num_sent``: tokens of them that are sent.
        ``link_cost``: cost of the link to the target.
        """
        if self._layers == "all" or (self._layers == "auto" and self._token_s is None):
            return self.num_layers
        if self._layers != "auto":
            return min(self._layers, self.num_layers)
        assert self._token_s is not None
        return layers_per_push(
            num_layers=self.num_layers,
            layer_s=self._token_s * num_tokens,
            layer_bytes=num_sent * self._token_bytes,
            layer_pieces=len(touched_pages(Span(0, num_sent), self._page_tokens))
            * self._num_tensors,
            link_cost=link_cost,
        ).layers

    def _update(self) -> None:
        """Use the previous step's time, if its events have happened. Never waits for a GPU."""
        timing, self._timing = self._timing, None
        if timing is None or timing.ended is None:
            return
        seconds = _elapsed_s(timing.began, timing.ended)
        if seconds is not None:
            latest = seconds / (timing.num_tokens * self.num_layers)
            self._token_s = latest if self._token_s is None else (self._token_s + latest) / 2


def _elapsed_s(began: Any, ended: Any) -> float | None:
    """Return the seconds between two marks of one kind; None before the second event happens."""
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1e3 if ended.query() else None


class EventRecorder:
    """Records events behind the work queued on ``device``, a ``torch.device``.

    For the engine's thread: events go to its current stream. Imports torch only for a GPU.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"

    def computed(self) -> Waitable | None:
        """Return an event behind all work queued on the device; None on a CPU."""
        return self._event(timing=False) if self._on_gpu else None

    def now(self) -> TimedEvent | float:
        """Return a timed event behind all work queued on the device; on a CPU, the clock."""
        return self._event(timing=True) if self._on_gpu else time.perf_counter()

    def _event(self, *, timing: bool) -> Any:
        import torch  # noqa: PLC0415 - not installed everywhere

        event = torch.cuda.Event(enable_timing=timing)
        event.record(torch.cuda.current_stream(self._device))
        return event
