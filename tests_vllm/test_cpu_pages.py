"""The form in which this machine's vLLM kernels keep K, found by writing a block."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvferry.connectors.vllm.cpu_pages import has_columns

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.attention.backends.cpu_attn  # noqa: F401 - it warns when it is imported


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "width"), [(32, 64), (64, 128), (48, 80)])
def test_kernels_without_amx_keep_columns(dtype: torch.dtype, block: int, width: int) -> None:
    is_amx = torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16 and block % 32 == 0
    cache = torch.zeros(2, 1, block, 2 * width, dtype=dtype)
    assert has_columns(cache, "auto") is (not is_amx)
    assert not has_columns(cache, "fp8")
