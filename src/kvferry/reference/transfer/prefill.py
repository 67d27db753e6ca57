"""A prefill rank's end of transfers: each chunk is pushed when it has been computed.

By groups of layers where that pays: a group leaves while the layers above are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry import (
    EventRecorder,
    LayerPushTuner,
    Outgoing,
    SourceEndpoint,
    Span,
    Waitable,
    touched_pages,
)
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.engine.steps import RequestWork, Sample, SampleFailed, StepPlan
from kvferry.reference.transfer.extension import EndpointSettings, RoomExtension
from kvferry.reference.transfer.messages import FirstTokenNote, OpenCommand, ReceiveCommand, encode


class PrefillExtension(RoomExtension[Outgoing, SourceEndpoint]):
    """A source endpoint beside a prefill rank."""

    def __init__(self, settings: EndpointSettings, rank: int) -> None:
        super().__init__(SourceEndpoint, settings, rank)
        self._begun: set[str] = set()
        # How many layers go at a time in this step.
        self._per_push = 0

    def start(self, cache: RankCache) -> None:
        """Make the endpoint over the rank's cache."""
        self._page_tokens = cache.layout.page_tokens
        self._marks = EventRecorder(cache.memory.device)
        self.pace = LayerPushTuner(self.settings.layers, cache.layout, self.rank, self._marks.now)
        super().start(cache)

    def _begin(self, command: OpenCommand | ReceiveCommand) -> Outgoing:
        return self.endpoint.open(
            command.room,
            deadline_s=command.deadline_s,
            request=command.asked_as,
            traceparent=command.traceparent,
        )

    def _moved(self, handle: Outgoing) -> dict[str, int]:
        return {str(mode): num_bytes for mode, num_bytes in handle.carried.items()}

    def before(self, plan: StepPlan) -> None:
        """Announce what this step computes, so that credits are there when it is."""
        super().before(plan)
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is None:
                continue
            if work.request not in self._begun:
                self._begun.add(work.request)
                self._push_cached(room.handle, work)
            room.handle.prepare((work.first, work.end), self._pages(work, work.first, work.end))
        if plan.works:
            self._begin_step(plan)

    def _begin_step(self, plan: StepPlan) -> None:
        num_tokens = sum(len(work.tokens) for work in plan.works)
        num_sent = sum(len(work.tokens) for work in plan.works if work.request in self.rooms)
        self.pace.begin(num_tokens)
        self._per_push = self.pace.per_push(num_tokens, num_sent, self.endpoint.link_cost)

    def computed(self, plan: StepPlan, layer: int) -> None:
        """Push the group of layers that ends with this one, unless it is all of them."""
        end = layer + 1
        if end == self.pace.end:
            self.pace.finish()
        place = (layer - self.pace.first) % self._per_push
        if place != self._per_push - 1 and end != self.pace.end:
            return
        layers = (layer - place, end)
        if layers == (self.pace.first, self.pace.end):
            return
        computed = self._computed()
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is not None:
                self._push(room.handle, work, computed, layers)

    def _push(
        self,
        room: Outgoing,
        work: RequestWork,
        computed: Waitable | None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        pages = self._pages(work, work.first, work.end)
        # With the last chunk, a layer's state is what decode begins with.
        states = None if work.sampling is None else work.row
        room.push((work.first, work.end), pages, after=computed, layers=layers, states=states)

    def _push_cached(self, room: Outgoing, work: RequestWork) -> None:
        """The prompt's beginning may be in the pages from an earlier request."""
        if work.first:
            pages = self._pages(work, 0, work.first)
            room.push((0, work.first), pages, after=self._computed())

    def after(
        self, plan: StepPlan, samples: Sequence[Sample], failures: Sequence[SampleFailed]
    ) -> list[bytes]:
        """Push the step's chunks. With the last one of a prompt comes its first token.

        A prompt without a first token is of no use at decode, so its room is aborted.
        """
        computed = self._computed()
        firsts = {sample.request: sample for sample in samples}
        failed = {failure.request for failure in failures}
        for work in plan.works:
            room = self.rooms.get(work.request)
            if room is None:
                continue
            if work.request in failed:
                room.handle.abort()
                continue
            if self._per_push >= self.pace.num_layers:
                self._push(room.handle, work, computed)
            if work.sampling is not None:
                first = firsts.get(work.request)
                metadata = self._metadata(first) if first else b""
                room.handle.close(
                    metadata,
                    states=work.row,
                    tokens=work.end,
                    after=computed,
                    digest=room.digest,
                )
        notes = super().after(plan, samples, failures)
        self._begun &= self.rooms.keys()
        return notes

    def _metadata(self, first: Sample) -> bytes:
        return encode(FirstTokenNote(first, self.settings.http, self.settings.life))

    def _pages(self, work: RequestWork, first: int, end: int) -> list[int]:
        """The pages that these tokens touch."""
        touched = touched_pages(Span(first, end), self._page_tokens)
        return work.pages[touched.first : touched.end]

    def _computed(self) -> Waitable | None:
        """What happens once the GPU has done all that it was given; None where it is done."""
        return self._marks.computed()
