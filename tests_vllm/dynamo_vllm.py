"""``python -m dynamo.vllm`` on a CPU, with stand-ins for unused imports of Dynamo 1.6.

Dynamo pins vLLM 0.31 and imports a function for embedding workers that 0.32 does not have, and a
function of transformers that needs torchvision.
"""

from __future__ import annotations

import runpy
import sys
import types

import vllm.v1.engine.utils

PICTURES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

if __name__ == "__main__":
    pictures = types.ModuleType(PICTURES)
    pictures.smart_resize = None  # type: ignore[attr-defined]
    sys.modules.setdefault(PICTURES, pictures)
    if not hasattr(vllm.v1.engine.utils, "get_engine_zmq_addresses"):
        vllm.v1.engine.utils.get_engine_zmq_addresses = None
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
