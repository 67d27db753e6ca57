"""Which files of which wheels travel, by engine.

A payload has to fit into the 64 MiB that a GPU machine's tool may accept, so it leaves out what a
server of a dense text model never reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
# Compute capability of the H200.
ARCH = 90


class Selection(NamedTuple):
    """Files to keep of one distribution, besides the rules for all.

    ``drop`` matches paths to leave out, and ``keep`` paths to which the rules for all do not apply.
    If ``roots`` is given, a shared object travels only if ``roots`` matches it or one that travels
    links to it. ``pruned`` maps a shared object with CUDA code to the numbers of the containers to
    keep, or to None for all of them. ``replaced`` maps a file to an old and a new text.
    """

    drop: str = r"(?!)"
    keep: str = r"(?!)"
    roots: str | None = None
    pruned: Mapping[str, range | None] = {}
    replaced: Mapping[str, tuple[str, str]] = {}


class Contents(NamedTuple):
    """The wheels of one engine, and the selections by distribution."""

    requirements: Path
    selections: Mapping[str, Selection]


# Tests, sources, and data that only tools read.
_DROP = re.compile(
    r"(^|/)(tests?|testing_data|docs|__pycache__|locales|node_modules|include)/"
    r"|\.(pyi|pyx|pxd|a|c|cc|cpp|cu|cuh|h|hpp|md|rst|js|map|html|css|exe|la)$"
    r"|^tvm_ffi/(share|src|3rdparty)/|^mistral_common/data/"
)
# Versions, entry points and the list of files, which engines look up.
_METADATA = re.compile(r"\.dist-info/(METADATA|RECORD|entry_points\.txt|top_level\.txt)$")

_VLLM = Selection(
    drop=r"/configs/[^/]*\.json$|^vllm/third_party/(deep_gemm|fmha_sm100)/|^vllm/vllm-rs"
    r"|^vllm/(_deepselect|_flashkda|_flashmla|_moe|_qutlass)|_vllm_fa2_C",
    pruned={
        "vllm/_C_stable_libtorch.abi3.so": None,
        # FlashAttention 3 for bfloat16 and heads of 128.
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": range(10),
    },
)
_SGLANG = Selection(
    # The compiled parts are for its Rust gateway and other devices.
    drop=r"\.so$|^sglang/(multimodal_gen|test|benchmark)/",
    # SGLang does not start without the sources of its kernels.
    keep=r"^sglang/(kernels|srt)/",
    # All tensor-parallel ranks of a test share one GPU.
    replaced={
        "sglang/srt/arg_groups/validation_hook.py": (
            "assert cfg.gpu_id_step >= 1",
            "assert cfg.gpu_id_step >= 0",
        )
    },
)
# Of NIXL's plugins only UCX travels.
_NIXL_CUDA = Selection(
    drop=r"^nixl_ep|perftest|^nixl_cu13\.scripts/|/plugins/(?!libplugin_UCX)"
    r"|\.libs/nixl/(?!libplugin_UCX)",
    roots=r"^nixl_cu13/|libplugin_UCX|^\.nixl_cu13\.mesonpy\.libs/|/ucx/",
)
_NIXL = {"nixl": Selection(drop=r"^nixl_ep/"), "nixl-cu13": _NIXL_CUDA}
_MOONCAKE = Selection(
    drop=r"^mooncake/(mooncake_(master|client)|transfer_engine_bench)$",
    roots=r"^mooncake/engine\.so$",
)
# Libraries that Mooncake expects of the system.
_NIXL_LIBRARIES = Selection(drop=r"^(?!nixl_cu13\.libs/)", roots=r"/lib(ibverbs|mlx5|numa|curl)-")

CONTENTS = {
    "vllm": Contents(ROOT / "requirements/gpu-vllm.txt", {"vllm": _VLLM, **_NIXL}),
    "sglang": Contents(ROOT / "requirements/gpu-sglang.txt", {"sglang": _SGLANG, **_NIXL}),
    "mooncake": Contents(
        ROOT / "requirements/gpu-mooncake.txt",
        {"mooncake-transfer-engine-cuda13": _MOONCAKE, "nixl-cu13": _NIXL_LIBRARIES},
    ),
}


def travels(path: str, selection: Selection) -> bool:
    """Return whether a wheel's file belongs into the payload, its links to others aside."""
    if ".dist-info/" in path:
        return _METADATA.search(path) is not None
    if re.search(selection.drop, path):
        return False
    return re.search(selection.keep, path) is not None or not _DROP.search(path)


def linked(needed: Mapping[str, tuple[str, ...]], roots: str) -> set[str]:
    """Return the shared objects that ``roots`` matches, and those they link to.

    ``needed`` maps the path of each shared object to the file names that it links to.
    """
    by_name: dict[str, list[str]] = {}
    for path in needed:
        by_name.setdefault(Path(path).name, []).append(path)
    found: set[str] = set()
    waiting = [path for path in needed if re.search(roots, path)]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [each for name in needed[path] for each in by_name.get(name, ())]
    return found
