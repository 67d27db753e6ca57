"""``python -m dynamo.vllm`` on a CPU: what Dynamo 1.6 imports and neither needs nor finds here.

It pins vLLM 0.31 and imports a function that 0.32 has not, for its embedding workers; and a
function of transformers that needs torchvision, for pictures.
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
