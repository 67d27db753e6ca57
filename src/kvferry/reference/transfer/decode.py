"""A decode rank's end of transfers: pages are offered, and filled by the sources."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry import Incoming, TargetEndpoint
from kvferry.reference.engine.cache import RankCache
from kvferry.reference.transfer.extension import EndpointSettings, RoomExtension
from kvferry.reference.transfer.messages import OpenCommand, ReceiveCommand


class DecodeExtension(RoomExtension[Incoming, TargetEndpoint]):
    """A target endpoint beside a decode rank."""

    def __init__(self, settings: EndpointSettings, rank: int) -> None:
        super().__init__(TargetEndpoint, settings, rank)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that sources can write into."""
        return self.transports.allocate(num_bytes)

    def start(self, cache: RankCache) -> None:
        """Make the endpoint over the rank's cache."""
        self._device = cache.memory.device
        super().start(cache)

    def _begin(self, command: OpenCommand | ReceiveCommand) -> Incoming:
        assert isinstance(command, ReceiveCommand), command
        if self._device.type == "cuda":
            # Whoever had these pages before may have left steps in the GPU's queue that write them.
            torch.cuda.current_stream(self._device).synchronize()
        return self.endpoint.receive(
            command.room,
            prefill=command.prefill,
            tokens=command.tokens,
            prefix=command.prefix,
            pages=command.pages,
            states=command.row,
            deadline_s=command.deadline_s,
            digest=command.digest,
            request=command.asked_as,
            traceparent=command.traceparent,
        )
