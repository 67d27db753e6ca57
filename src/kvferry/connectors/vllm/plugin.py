"""Plug-in that vLLM loads in each of its processes (entry point ``vllm.general_plugins``).

It registers the connector under its name, so that users need not give a module path. Under NVIDIA
Dynamo it also registers how requests reach prefill and decode: as with vLLM's NixlConnector,
decode receives the parameters that prefill answered.
"""

from __future__ import annotations

import sys

NAME = "KVFerryConnector"
MODULE = "kvferry.connectors.vllm"


def register() -> None:
    """Register the connector. vLLM calls this at least once in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    # Only if Dynamo runs this process, because importing it is expensive.
    if "dynamo.vllm" in sys.modules:
        _register_with_dynamo()


def _register_with_dynamo() -> None:
    from dynamo.vllm.kv_connector_protocols import (  # noqa: PLC0415
        KV_CONNECTOR_PROTOCOLS,
        NixlConnectorProtocol,
    )

    KV_CONNECTOR_PROTOCOLS.setdefault(NAME, NixlConnectorProtocol)
