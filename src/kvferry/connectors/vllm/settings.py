"""Settings of the connector in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvferry import (
    ClusterKey,
    EndpointConfig,
    InputError,
    Layers,
    check_discovery_url,
)
from kvferry.connectors.liveness import LIVENESS, LIVENESS_SETTINGS

EXAMPLE = "http://10.0.0.1:7400"

# How long to look for a prefill instance. It may be restarting, or a client may have invented its
# name. This is the length of a lease, within which every live instance renews its registration.
DISCOVERY_TIMEOUT_S = 10.0

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an instance, the same on all its ranks.

    ``instance``: name at the discovery service. ``host``: address at which peers reach this host.
    ``model``: identifies the checkpoint if vLLM's model name does not.
    ``deadline_s``: time limit of a room. At decode it starts when blocks are allocated; at prefill
    when the prompt starts to be computed, so it also limits how long finished blocks are held.
    ``layers``: how many layers to push at a time during a step, if vLLM reports single layers.
    ``silence_s`` and ``unresponsive_s``: see ``LivenessConfig``.
    """

    discovery: str
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    key_file: str | None = None
    host: str = "127.0.0.1"
    transport: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    layers: Layers = "auto"
    model: str | None = None
    deadline_s: Seconds = 120.0
    silence_s: float = LIVENESS.silence_s
    unresponsive_s: float = LIVENESS.unresponsive_s
    staging_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    options: dict[str, str] = {}

    def key(self) -> ClusterKey | None:
        """Return the cluster key, if there is one."""
        return ClusterKey.read(self.key_file) if self.key_file else ClusterKey.from_environment()

    def endpoint_config(self) -> EndpointConfig:
        """Return the configuration of an endpoint."""
        liveness = {name: getattr(self, name) for name in LIVENESS_SETTINGS}
        config = EndpointConfig(
            host=self.host,
            deadline_s=self.deadline_s,
            discovery_timeout_s=min(DISCOVERY_TIMEOUT_S, self.deadline_s),
            options=self.options,
            protocol=msgspec.structs.replace(LIVENESS, **liveness),
        )
        if self.staging_bytes is None:
            return config
        return msgspec.structs.replace(config, staging_bytes=self.staging_bytes)

    def instance_name(self, replica: int | None) -> str:
        """Return the instance's name. Each data-parallel replica is its own instance."""
        return self.instance if replica is None else f"{self.instance}-dp{replica}"


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings. Raises ``InputError`` with the remedy."""
    known = ConnectorSettings.__struct_fields__
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise InputError(
            f"kv_connector_extra_config has no {unknown[0]!r:.80}; it takes {', '.join(known)}"
        )
    try:
        settings = msgspec.convert(dict(extra), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise InputError(
            f"kv_connector_extra_config: {error}; it takes discovery, such as {EXAMPLE}, and "
            f"instance, a name, at least"
        ) from None
    check_discovery_url(settings.discovery)
    settings.endpoint_config()  # Validate here, not only in a worker.
    return settings
