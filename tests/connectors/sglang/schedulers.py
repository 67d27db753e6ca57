"""A simulated SGLang scheduler: pools, metadata rows and requests in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from endpoint.fleets import eventually
from numpy.typing import NDArray

from kvferry import DType, EndpointConfig, Transport
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.metadata import MetadataRows
from kvferry.connectors.sglang.pools import Buffers, SglangCache
from kvferry.connectors.sglang.settings import RankSettings

ENOUGH_S = 30.0
NUM_ROWS = 4


class SchedulerRows:
    """Metadata buffers: the first token of each request, and its room."""

    def __init__(self) -> None:
        self.tokens = np.zeros((NUM_ROWS, 16), np.int32)
        self.rooms = np.zeros((NUM_ROWS, 8), np.uint64)

    def rows(self) -> MetadataRows:
        arrays: list[NDArray[Any]] = [self.tokens, self.rooms]
        return MetadataRows(
            [array.ctypes.data for array in arrays], [array.nbytes for array in arrays], [64, 64]
        )


def request(num_tokens: int, seed: int = 0) -> SimpleNamespace:
    """The fields of SGLang's request that the connector reads."""
    return SimpleNamespace(
        origin_input_ids=list(range(seed, seed + num_tokens)),
        **dict.fromkeys(("lora_id", "cache_salt", "extra_key", "multimodal_inputs")),
    )


def new_pool(transport: Transport, *shape: int) -> NDArray[np.float32]:
    """Zeros in memory that others may write."""
    num_bytes = 4 * int(np.prod(shape))
    return transport.allocate(num_bytes).view(np.float32).reshape(shape)


def buffers_of(
    pools: Sequence[NDArray[Any]],
    layers: tuple[int, ...],
    page: int,
    dtype: DType = DType.FLOAT32,
) -> Buffers:
    """Pools of token rows, as SGLang names them."""
    return Buffers(
        addresses=[pool.ctypes.data for pool in pools],
        lengths=[pool.nbytes for pool in pools],
        page_lengths=[pool[:page].nbytes for pool in pools],
        layers=layers,
        page_tokens=page,
        dtype=dtype,
    )


def settings_of(
    cache: SglangCache,
    rows: SchedulerRows,
    replica: Replica,
    transport: Transport,
    *,
    discovery: str | None,
    deadline_s: float = ENOUGH_S,
) -> RankSettings:
    """A rank's, with nothing staged."""
    return RankSettings(
        cache=cache,
        replica=replica,
        rows=rows.rows(),
        model="m",
        dtype="float32",
        transport=transport,
        config=EndpointConfig(staging_bytes=0, deadline_s=deadline_s),
        discovery=discovery,
    )


def until(happens: Any) -> None:
    eventually(happens, ENOUGH_S)
