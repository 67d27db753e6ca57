"""Liveness timeouts inside an engine: the defaults and the settings of both connectors. Pure."""

from __future__ import annotations

from kvferry import ProtocolConfig

# An engine's main thread computes, and spins while it waits, so the threads of an endpoint may get
# the interpreter late: 8 s, an endpoint's own default, was seen to be too short.
LIVENESS = ProtocolConfig(silence_s=20.0)

# Settings that a user may change: these names in vLLM, KVFERRY_SILENCE_S and so on in SGLang.
LIVENESS_SETTINGS = ("silence_s", "unresponsive_s")
