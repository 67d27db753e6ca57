"""The pace of a rank: what a layer takes to compute, and so how many to push at a time."""

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

# How many layers are pushed at a time: what is best, so many, or all.
Layers = Annotated[int, Meta(ge=1)] | Literal["auto", "all"]


class TimedEvent(Protocol):
    """A GPU's event that keeps the time, such as torch's."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this one to that one."""
        ...


class LayerTiming(NamedTuple):
    """A step that is being timed: events of a GPU, or the clock."""

    num_tokens: int
    began: TimedEvent | float
    ended: TimedEvent | float | None = None


class LayerPushTuner:
    """How many layers one rank pushes at a time. Used by the rank's thread alone.

    ``mark`` gives the time by what computes: an event behind what a GPU was given, or else
    the clock.
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
        self._page_tokens = layout.page_tokens
        spec, held = layout.spec, layout.rank_shards(rank)
        numbers = {n for one in held for n in spec.group(one.group).layers_in(one.layers)}
        self.first, self.end = min(numbers), max(numbers) + 1
        self._num_tensors = max(len(spec.group(one.group).tensors) for one in held)
        self._token_bytes = max(len(one.units) * spec.group(one.group).unit_bytes for one in held)
        # Seconds for one token of one layer; None before the first step was timed.
        self._token_s: float | None = None
        self._measure: LayerTiming | None = None

    @property
    def num_layers(self) -> int:
        """The layers of this rank."""
        return self.end - self.first

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._learn()
        self._measure = LayerTiming(num_tokens, self._mark())

    def finish(self) -> None:
        """Its last layer is computed, or queued."""
        if self._measure is not None and self._measure.ended is None:
            self._measure = self._measure._replace(ended=self._mark())

    def per_push(self, num_tokens: int, num_sent: int, link_cost: LinkCost) -> int:
        """How many layers to push at a time in a step of which so many tokens are sent."""
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

    def _learn(self) -> None:
        """From the step before, if it is over: nobody waits for a GPU here."""
        measure, self._measure = self._measure, None
        if measure is None or measure.ended is None:
            return
        seconds = _between(measure.began, measure.ended)
        if seconds is not None:
            found = seconds / (measure.num_tokens * self.num_layers)
            self._token_s = found if self._token_s is None else (self._token_s + found) / 2


def _between(began: TimedEvent | float, ended: TimedEvent | float) -> float | None:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert not isinstance(began, float)
    assert not isinstance(ended, float)
    return began.elapsed_time(ended) / 1e3 if ended.query() else None


class EventRecorder:
    """Marks behind what a device, a ``torch.device``, was given to compute.

    On a CPU what was called for is done. Needs torch only where the device is a GPU. For the
    engine's own thread, whose stream counts.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def computed(self) -> Waitable | None:
        """Return an event behind all work queued on the device; None where there is none."""
        return self._event(timing=False) if self._on_gpu else None

    def now(self) -> TimedEvent | float:
        """The time by the device: an event behind all that it was given, or the clock."""
        return self._event(timing=True) if self._on_gpu else time.perf_counter()

    @property
    def _on_gpu(self) -> bool:
        return bool(self._device.type == "cuda")

    def _event(self, *, timing: bool) -> Any:
        import torch  # noqa: PLC0415 - installed where there is a GPU

        event = torch.cuda.Event(enable_timing=timing)
        event.record(torch.cuda.current_stream(self._device))
        return event
