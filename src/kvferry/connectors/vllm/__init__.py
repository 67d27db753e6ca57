"""Connector for vLLM.

vLLM creates one ``KVFerryConnector`` in the scheduler and one in each worker. It forwards vLLM's
hooks to ``scheduler.py``, which assigns requests to rooms, and ``worker.py``, which has the
endpoints. Only ``connector.py``, ``metrics.py`` and ``plugin.py`` import vLLM. Only the first and
``worker.py`` import torch. Importing this package imports neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connectors.vllm.compat import missing_import

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "KVFerryConnector":
            raise AttributeError(f"kvferry.connectors.vllm has no {name!r}")
        import vllm  # noqa: PLC0415

        try:
            from kvferry.connectors.vllm.connector import KVFerryConnector  # noqa: PLC0415
        except ImportError as error:
            raise missing_import(vllm.__version__, error) from error
        return KVFerryConnector
