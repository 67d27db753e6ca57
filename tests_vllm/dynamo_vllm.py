"""``python -m dynamo.vllm`` where torchvision can't be installed.

Dynamo imports a function for pictures from a module of transformers that needs torchvision. The
test sends no pictures. Nothing of vLLM or Dynamo is replaced.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types

PICTURES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

if __name__ == "__main__":
    if importlib.util.find_spec("torchvision") is None:
        pictures = types.ModuleType(PICTURES)
        pictures.smart_resize = None  # type: ignore[attr-defined]
        sys.modules[PICTURES] = pictures
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
