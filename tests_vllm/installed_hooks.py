"""Prints vLLM's version, its connector hooks and those that kvferry defines, as one JSON line."""

from __future__ import annotations

import json

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvferry.connectors.vllm.connector import KVFerryConnector

if __name__ == "__main__":
    base = [*vars(KVConnectorBase_V1), *vars(SupportsHMA)]
    hooks = [name for name in base if not name.startswith("_")]
    own = [name for name in hooks if name in vars(KVFerryConnector)]
    print(json.dumps({"version": vllm.__version__, "hooks": hooks, "own": own}))
