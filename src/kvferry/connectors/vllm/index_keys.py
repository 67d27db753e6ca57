"""Index keys of sparse attention in vLLM's blocks: first all keys of a block, then all scales.

vLLM registers them as rows of a key and its scales, which is only the size of an entry. On a CPU
whole blocks are transferred, so their order does not matter.
"""

from __future__ import annotations

from kvferry import DType, InputError, Tensor

# Elements of a key with a common scale, and the bytes of both.
BLOCK, BLOCK_BYTES = 128, 132
KEYS, SCALES = "keys", "scales"


def holds_index_keys(name: str) -> bool:
    """Return whether a cache has the index keys of a layer."""
    return name.endswith(".indexer.k_cache")


def index_tensors(name: str, content: int) -> tuple[Tensor, Tensor]:
    """Return the tensors of a cache whose rows have this many bytes."""
    blocks, rest = divmod(content, BLOCK_BYTES)
    if rest:
        raise InputError(
            f"vLLM's index keys {name!r:.200} have {content} bytes, no multiple of {BLOCK_BYTES} "
            f"for {BLOCK} values in FP8 with a scale; this form is not supported"
        )
    keys = Tensor(KEYS, DType.UINT8, blocks * BLOCK)
    return keys, Tensor(SCALES, DType.UINT8, blocks * (BLOCK_BYTES - BLOCK))
