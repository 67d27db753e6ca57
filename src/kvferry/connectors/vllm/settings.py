"""Settings of the connector: ``kv_connector_extra_config``, and which vLLM it fits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvferry import (
    ClusterKey,
    EndpointConfig,
    InputError,
    Layers,
    checked_address,
)
from kvferry.connectors.liveness import LIVENESS, LIVENESS_SETTINGS

EXAMPLE = "http://10.0.0.1:7400"

# A prefill that is not at discovery may be back soon, or be a client's invention that holds
# blocks for nothing. This is a lease's length: whoever lives has renewed his by then.
FIND_S = 10.0

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an instance is told of the cluster; the same on all its ranks.

    ``instance`` names it at discovery; ``host`` is the resolve_ip address that peers reach it
    by. ``model`` tells one checkpoint from another where vLLM's own name does not. A room must
    end within ``deadline_s``: at decode from when its blocks are there, at prefill from when it
    begins to compute, so that it is also how long finished blocks wait for a decode. ``layers``
    is how many are pushed at a time as they are computed, where vLLM tells of each. ``silence_s``
    and ``unresponsive_s`` are those of ``LivenessConfig``.
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
        """The cluster's key, if there is one."""
        return ClusterKey.read(self.key_file) if self.key_file else ClusterKey.from_environment()

    def endpoint_config(self) -> EndpointConfig:
        """As an endpoint takes it."""
        liveness = {name: getattr(self, name) for name in LIVENESS_SETTINGS}
        config = EndpointConfig(
            host=self.host,
            deadline_s=self.deadline_s,
            discovery_timeout_s=min(FIND_S, self.deadline_s),
            options=self.options,
            protocol=msgspec.structs.replace(LIVENESS, **liveness),
        )
        if self.staging_bytes is None:
            return config
        return msgspec.structs.replace(config, staging_bytes=self.staging_bytes)

    def name_of(self, replica: int | None) -> str:
        """The instance's name; each data-parallel replica is one of its own."""
        return self.instance if replica is None else f"{self.instance}-dp{replica}"


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The settings, or one sentence that says what to change."""
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
    checked_address(settings.discovery, "discovery", EXAMPLE)
    settings.endpoint_config()  # what is wrong with it is said here, not in a worker
    return settings
