"""Settings of one scheduler rank, from SGLang and the environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry import (
    ClusterKey,
    DType,
    EndpointConfig,
    InputError,
    Transport,
    Waitable,
    check_discovery_url,
    model_fingerprint,
)
from kvferry.connectors.settings import TransferSettings
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.metadata import MetadataRows
from kvferry.connectors.sglang.pools import SglangCache

PREFIX = "KVFERRY_"


def no_pending_work() -> Waitable | None:
    """Return None: on a CPU no work is pending."""
    return None


def no_synchronization() -> None:
    """Do nothing: on a CPU no kernels are queued."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Settings of one rank's endpoint.

    ``model`` and ``dtype`` identify the cache's contents. ``discovery`` is the service that all
    servers share, or at a prefill server its own bootstrap URL, which decode servers learn from
    requests. ``record_event`` returns an event
    that completes after all work queued on the GPU; ``synchronize`` waits for that work.
    """

    cache: SglangCache
    replica: Replica
    rows: MetadataRows
    model: str
    dtype: str
    transport: str | Transport
    config: EndpointConfig = field(default_factory=EndpointConfig)
    discovery: str | None = None
    key: ClusterKey | None = None
    record_event: Callable[[], Waitable | None] = no_pending_work
    synchronize: Callable[[], None] = no_synchronization


def dtype_of(model: Any) -> str:
    """Return the dtype that a model computes in; ``model`` is SGLang's ``ModelConfig``."""
    return str(DType.parse(str(model.dtype)))


def model_of(model: Any, server_args: Any, given: str | None, draft: Any = None) -> str:
    """Return the fingerprint of the model and of the draft whose cache is transferred, if any.

    ``given``: the user's name for the checkpoint, if the two sides store it in different formats.
    """
    overrides = json.loads(server_args.json_model_override_args or "{}")
    if draft is not None:
        overrides["draft model"] = _fingerprint(draft, server_args, given, {})
    return _fingerprint(model, server_args, given, overrides)


def _fingerprint(model: Any, server_args: Any, given: str | None, overrides: dict[str, Any]) -> str:
    return model_fingerprint(
        model.model_path,
        model.hf_text_config.to_dict(),
        dtype=dtype_of(model),
        tokenizer=server_args.tokenizer_path,
        revision=model.revision,
        overrides=overrides,
        given=given,
    )


class ServerSettings(TransferSettings, frozen=True, kw_only=True):
    """Settings of a server, each in the environment variable ``KVFERRY_`` and its name.

    ``deadline_s`` replaces the time limits of SGLang for a room. ``discovery``: a discovery service
    that all servers share, such as etcd; without one, each prefill server's bootstrap port is one.
    """

    discovery: str | None = None


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def read_settings(environment: Mapping[str, str]) -> ServerSettings:
    """Return the settings in the environment. Raises ``InputError`` with the remedy."""
    given = {}
    for setting in msgspec.structs.fields(ServerSettings):
        text = environment.get(variable_of(setting.name))
        if text:
            given[setting.name] = _value_of(setting, text)
    settings = ServerSettings(**given)
    if settings.discovery is not None:
        check_discovery_url(settings.discovery)
    settings.endpoint_config(host="127.0.0.1", deadline_s=1.0)  # Validate the combination too.
    return settings


def _value_of(setting: Any, text: str) -> Any:
    """Return a setting's value; only ``options`` are JSON."""
    try:
        if setting.type == dict[str, str]:
            return msgspec.json.decode(text, type=setting.type)
        return msgspec.convert(text, setting.type, strict=False)
    except msgspec.DecodeError as error:
        name = variable_of(setting.name)
        raise InputError(f"{name}={text!r:.80}: {error}; correct it or unset it") from None
