"""vLLM's connector: kvferry inside ``vllm serve``, on any tensor-parallel size of either side.

``KVFerryConnector`` is what vLLM loads. It is made once beside the scheduler and once in each
worker, and hands everything on: to ``scheduler.py``, which decides which request meets in which
room, and to ``worker.py``, which holds a rank's endpoints. What they decide by is in modules that
import neither vLLM nor torch: ``settings.py``, ``params.py``, ``caches.py``, ``paging.py``,
``prefill.py``, ``decode.py``, ``orders.py``. Importing this package alone imports neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "KVFerryConnector":
            raise AttributeError(f"kvferry.connectors.vllm has no {name!r}")
        from kvferry.connectors.vllm.connector import KVFerryConnector  # noqa: PLC0415

        return KVFerryConnector
