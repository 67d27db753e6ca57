"""A decode rank's end of transfers: pages are offered, and filled by the sources."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.runtime.incoming import Incoming
from kvferry.runtime.memory import Memory
from kvferry.runtime.rank import RankEndpoint
from kvferry.runtime.target import TargetEndpoint
from kvferry.serve.cache import Cache
from kvferry.serve.transfer import Open, Receive, RoomExtension


class DecodeExtension(RoomExtension[Incoming]):
    """A target endpoint beside a decode rank."""

    endpoint: TargetEndpoint

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory that sources can write into."""
        return self.transport.allocate(num_bytes)

    def _connect(self, cache: Cache, memory: Memory) -> RankEndpoint[Any]:
        self.endpoint = TargetEndpoint(
            cache.layout,
            memory,
            name=self.settings.name,
            rank=self.rank,
            model=self.settings.model,
            transport=self.transport,
            rendezvous=self.settings.rendezvous,
            key=self.settings.key(),
            config=self.settings.config,
        )
        return self.endpoint

    def _begin(self, command: Open | Receive) -> Incoming:
        assert isinstance(command, Receive), command
        return self.endpoint.receive(
            command.room,
            prefill=command.prefill,
            tokens=command.tokens,
            prefix=command.prefix,
            pages=command.pages,
            states=command.row,
            deadline_s=command.deadline_s,
        )
