"""The form in which vLLM's CPU kernels keep K and V inside a block.

Each (block, head) has an area for K and behind it one for V. Most kernels keep K by columns, that
is, all tokens of one element and then those of the next. Those for AMX interleave pairs of
elements. The form depends on the processor, the dtype and the block size, and vLLM does not report
it, so a small block is written here by the same operator and compared.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

log = logging.getLogger("vllm.kvferry")


def has_columns(cache: object, kept_as: str) -> bool:
    """Return whether an attention layer's cache keeps K by columns, and V by rows.

    ``kept_as`` is vLLM's setting of the cache's dtype. Quantised caches are not examined.
    """
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4 or kept_as != "auto":
        return False
    _, _, tokens, content = cache.shape
    if content % 2:
        return False
    return _writes_columns(cache.dtype, tokens, content // 2)


@lru_cache
def _writes_columns(dtype: torch.dtype, tokens: int, width: int) -> bool:
    """Return whether vLLM's operator writes a block in this form; False if it can't be called."""
    block = torch.zeros(1, 1, 2 * tokens, width, dtype=dtype)
    k, v = torch.rand(2, tokens, 1, width).to(dtype)
    try:
        from vllm import _custom_ops  # noqa: PLC0415 - so that tests need no vLLM
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

        _custom_ops.cpu_attn_reshape_and_cache(
            *(k, v, *block.chunk(2, dim=2), torch.arange(tokens)),
            _get_attn_isa(dtype, tokens, width),
        )
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError) as error:
        log.warning("unknown-cpu-pages dtype=%s tokens=%d reason=%r", dtype, tokens, str(error))
        return False
    written_k, written_v = block.chunk(2, dim=2)
    columns = written_k.reshape(width, tokens).T
    return torch.equal(columns, k[:, 0]) and torch.equal(written_v[0, 0], v[:, 0])
