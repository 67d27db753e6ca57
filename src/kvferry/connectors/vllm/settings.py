"""Settings of the connector in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvferry import EndpointConfig, InputError, Layers, check_discovery_url
from kvferry.connectors.settings import Seconds, TransferSettings

EXAMPLE = "http://10.0.0.1:7400"

# How long to look for a prefill instance. It may be restarting, or a client may have invented its
# name. This is the length of a lease, within which every live instance renews its registration.
DISCOVERY_TIMEOUT_S = 10.0
DEADLINE_S = 120.0
# After this a prompt is computed that could not be pulled.
PULL_DEADLINE_S = 10.0


class ConnectorSettings(TransferSettings, frozen=True, kw_only=True):
    """Settings of an instance, the same on all its ranks.

    ``instance``: name at the discovery service. At decode ``deadline_s`` starts when blocks are
    allocated; at prefill when the prompt starts to be computed, so it also limits how long finished
    blocks are held. ``layers``: how many layers to push at a time during a step, if vLLM reports
    single layers. ``max_rooms``, ``max_tokens``: how many rooms a decode receives at a time, and
    how many tokens in them; further requests wait in vLLM's queue. ``pull_deadline_s``: time limit
    of a pull from another instance's cache.
    """

    discovery: str
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    layers: Layers = "auto"
    max_rooms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    pull_deadline_s: Seconds = PULL_DEADLINE_S

    def rank_config(self) -> EndpointConfig:
        """Return the configuration of an endpoint."""
        config = self.endpoint_config(host="127.0.0.1", deadline_s=DEADLINE_S)
        timeout_s = min(DISCOVERY_TIMEOUT_S, config.deadline_s)
        return msgspec.structs.replace(config, discovery_timeout_s=timeout_s)

    def instance_name(self, replica: int | None) -> str:
        """Return the instance's name. Each data-parallel replica is its own instance."""
        return self.instance if replica is None else f"{self.instance}-dp{replica}"


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings. Raises ``InputError`` with the remedy."""
    fields = sorted(msgspec.structs.fields(ConnectorSettings), key=lambda field: not field.required)
    known = [field.name for field in fields]
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
    settings.rank_config()  # Validate here, not only in a worker.
    return settings
