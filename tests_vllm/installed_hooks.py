"""Prints vLLM's version, its connector hooks and those that kvferry defines, as one JSON line."""

from __future__ import annotations

import json

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvferry.connectors.vllm.connector import KVFerryConnector

if __name__ == "__main__":
    base = [*vars(KVConnectorBase_V1), *vars(SupportsHMA)]
    hooks = [name for name in base if not name.startswith("_")]
    kinds = [kind for kind in KVFerryConnector.__mro__ if kind.__module__.startswith("kvferry.")]
    own = [name for name in hooks if any(name in vars(kind) for kind in kinds)]
    print(json.dumps({"version": vllm.__version__, "hooks": hooks, "own": own}))
