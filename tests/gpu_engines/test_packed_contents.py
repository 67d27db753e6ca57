"""Which files of a wheel travel."""

from __future__ import annotations

import re

import pytest
from gpu_engines.packing.contents import CONTENTS, Selection, linked, travels

PLAIN = Selection()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("package/module.py", True),
        ("package/data.json", True),
        ("package/testing.py", True),
        ("package/_native.abi3.so", True),
        ("package/tests/test_module.py", False),
        ("package/native.cu", False),
        ("package/include/native.hpp", False),
        ("package-1.0.dist-info/entry_points.txt", True),
        ("package-1.0.dist-info/RECORD", True),
        ("package-1.0.dist-info/licenses/LICENSE", False),
    ],
)
def test_what_a_server_reads_travels(path: str, expected: bool) -> None:
    assert travels(path, PLAIN) is expected


def test_a_selection_drops_more() -> None:
    vllm = CONTENTS["vllm"].selections["vllm"]
    assert travels("vllm/_C_stable_libtorch.abi3.so", vllm)
    assert not travels("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", vllm)
    sglang = CONTENTS["sglang"].selections["sglang"]
    assert not travels("sglang/srt/_native.abi3.so", sglang)
    nixl = CONTENTS["sglang"].selections["nixl-cu13"]
    assert travels(".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so", nixl)
    assert not travels(".nixl_cu13.mesonpy.libs/plugins/libplugin_GDS.so", nixl)


def test_a_selection_keeps_what_the_rules_for_all_drop() -> None:
    """SGLang looks for the sources of its kernels when it is imported."""
    sglang = CONTENTS["sglang"].selections["sglang"]
    for path in ("csrc/attention/merge.cuh", "include/sgl_kernel/tensor.h"):
        assert travels(f"sglang/kernels/jit/{path}", sglang)
        assert not travels(f"sglang/kernels/jit/{path}", PLAIN)


def test_libraries_travel_with_what_links_to_them() -> None:
    needed = {
        "package/engine.so": ("liba-1.so", "libc.so.6"),
        "libs/liba-1.so": ("libb-2.so",),
        "libs/libb-2.so": ("liba-1.so",),
        "libs/libother.so": ("liba-1.so",),
    }
    assert linked(needed, r"/engine\.so$") == {
        "package/engine.so",
        "libs/liba-1.so",
        "libs/libb-2.so",
    }


@pytest.mark.parametrize("engine", CONTENTS)
def test_every_requirement_is_pinned(engine: str) -> None:
    contents = CONTENTS[engine]
    lines = contents.requirements.read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    names = {pin.split("==")[0].lower() for pin in pins}
    assert contents.selections.keys() <= names
