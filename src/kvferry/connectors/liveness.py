"""Liveness timeouts for endpoints inside an engine, shared by the connectors."""

from __future__ import annotations

from kvferry import ProtocolConfig

# An engine's busy main thread delays an endpoint's threads at the GIL. The default ``silence_s`` of
# 8 s has proven too short.
LIVENESS = ProtocolConfig(silence_s=20.0)

# Settings for users: these names in vLLM, KVFERRY_SILENCE_S and KVFERRY_UNRESPONSIVE_S in SGLang.
LIVENESS_SETTINGS = ("silence_s", "unresponsive_s")
