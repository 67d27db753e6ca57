"""The plug-in that vLLM loads in each of its processes (entry points, ``vllm.general_plugins``).

It makes the connector known by its name, so that no module path has to be given, and, where NVIDIA
Dynamo runs the engine, tells it how prefill and decode are asked: as with vLLM's NixlConnector, in
that decode is sent what prefill answered.
"""

from __future__ import annotations

import sys

NAME = "KVFerryConnector"
MODULE = "kvferry.connectors.vllm"


def register() -> None:
    """Called once or more in every process of vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    # Importing Dynamo is its own business: where it does not run, it is not looked for.
    if "dynamo.vllm" in sys.modules:
        _tell_dynamo()


def _tell_dynamo() -> None:
    from dynamo.vllm.kv_connector_protocols import (  # noqa: PLC0415
        KV_CONNECTOR_PROTOCOLS,
        NixlConnectorProtocol,
    )

    KV_CONNECTOR_PROTOCOLS.setdefault(NAME, NixlConnectorProtocol)
