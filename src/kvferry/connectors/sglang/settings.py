"""Settings of one scheduler rank, from SGLang and the environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvferry import (
    ClusterKey,
    DType,
    EndpointConfig,
    InputError,
    ProtocolConfig,
    Transport,
    Waitable,
    model_fingerprint,
)
from kvferry.connectors.liveness import LIVENESS, LIVENESS_SETTINGS
from kvferry.connectors.sglang.instances import Replica
from kvferry.connectors.sglang.metadata import MetadataRows
from kvferry.connectors.sglang.pools import SglangCache

TRANSPORT = "KVFERRY_TRANSPORT"
HOST = "KVFERRY_HOST"
# The user's name for the checkpoint, if the two sides store it in different formats.
MODEL = "KVFERRY_MODEL"
DEFAULT_TRANSPORT = "auto"


def no_pending_work() -> Waitable | None:
    """Return None: on a CPU no work is pending."""
    return None


def no_synchronization() -> None:
    """Do nothing: on a CPU no kernels are queued."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Settings of one rank's endpoint.

    ``model`` and ``dtype`` identify the cache's contents. ``discovery`` is the bootstrap URL of a
    prefill server; a decode server learns the URLs from requests. ``record_event`` returns an event
    that completes after all work queued on the GPU; ``synchronize`` waits for that work.
    """

    cache: SglangCache
    replica: Replica
    rows: MetadataRows
    model: str
    dtype: str
    transport: str | Transport
    bootstrap_s: float
    waiting_s: float
    config: EndpointConfig = field(default_factory=EndpointConfig)
    discovery: str | None = None
    key: ClusterKey | None = None
    record_event: Callable[[], Waitable | None] = no_pending_work
    synchronize: Callable[[], None] = no_synchronization


def dtype_of(model: Any) -> str:
    """Return the dtype that a model computes in; ``model`` is SGLang's ``ModelConfig``."""
    return str(DType.parse(str(model.dtype)))


def model_of(
    model: Any, server_args: Any, environment: Mapping[str, str], draft: Any = None
) -> str:
    """Return the fingerprint of the model and of the draft whose cache is transferred, if any."""
    overrides = json.loads(server_args.json_model_override_args or "{}")
    if draft is not None:
        overrides["draft model"] = _fingerprint(draft, server_args, environment, {})
    return _fingerprint(model, server_args, environment, overrides)


def _fingerprint(
    model: Any, server_args: Any, environment: Mapping[str, str], overrides: dict[str, Any]
) -> str:
    return model_fingerprint(
        model.model_path,
        model.hf_text_config.to_dict(),
        dtype=dtype_of(model),
        tokenizer=server_args.tokenizer_path,
        revision=model.revision,
        overrides=overrides,
        given=environment.get(MODEL),
    )


def transport_in(environment: Mapping[str, str]) -> str:
    """Return the configured transport."""
    return environment.get(TRANSPORT) or DEFAULT_TRANSPORT


def liveness_in(environment: Mapping[str, str]) -> ProtocolConfig:
    """Return the liveness timeouts that the environment sets."""
    config = LIVENESS
    for name in LIVENESS_SETTINGS:
        variable = f"KVFERRY_{name.upper()}"
        text = environment.get(variable)
        if text:
            try:
                config = replace(config, **{name: float(text)})
            except ValueError as error:
                raise InputError(
                    f"{variable} must be a number of seconds, such as "
                    f"{getattr(LIVENESS, name):g}, not {text!r:.80}: {error}"
                ) from None
    return config
