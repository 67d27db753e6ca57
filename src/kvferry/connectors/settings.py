"""Settings that the connectors of all engines have, so that a name means the same in each.

vLLM reads them from ``kv_connector_extra_config``, SGLang from the environment: ``silence_s`` is
``KVFERRY_SILENCE_S`` there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry import ClusterKey, EndpointConfig, ProofMode, ProtocolConfig

# An engine's busy main thread delays an endpoint's threads at the GIL. The default ``silence_s`` of
# 8 s has proven too short.
LIVENESS = ProtocolConfig(silence_s=20.0)
LIVENESS_SETTINGS = ("silence_s", "unresponsive_s")

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an instance, the same on all its ranks.

    ``host``: address at which peers reach this host. ``model``: identifies the checkpoint if the
    engine's name for it does not. ``deadline_s``: time limit of a room; None takes the engine's.
    ``silence_s`` and ``unresponsive_s``: see ``LivenessConfig``. ``staging_bytes``: budget for
    staging slots; None takes the endpoint's default. ``options``: the transport's own.
    ``proof``: which content decode compares with prefill's, see ``EndpointConfig``.
    """

    key_file: str | None = None
    host: str | None = None
    transport: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    model: str | None = None
    deadline_s: Seconds | None = None
    silence_s: float = LIVENESS.silence_s
    unresponsive_s: float = LIVENESS.unresponsive_s
    staging_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    proof: ProofMode = ProofMode.SAMPLED
    options: dict[str, str] = {}

    def key(self) -> ClusterKey | None:
        """Return the cluster key, if there is one."""
        return ClusterKey.read(self.key_file) if self.key_file else ClusterKey.from_environment()

    def endpoint_config(self, *, host: str, deadline_s: float) -> EndpointConfig:
        """Return the configuration of an endpoint. The arguments are the engine's defaults."""
        liveness = {name: getattr(self, name) for name in LIVENESS_SETTINGS}
        config = EndpointConfig(
            host=self.host or host,
            deadline_s=self.deadline_s or deadline_s,
            options=self.options,
            proof=self.proof,
            protocol=msgspec.structs.replace(LIVENESS, **liveness),
        )
        if self.staging_bytes is None:
            return config
        return msgspec.structs.replace(config, staging_bytes=self.staging_bytes)
