"""Settings of one scheduler rank: what SGLang and the environment say, as one value."""

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
from kvferry.connectors.sglang.pools import SglangCache
from kvferry.connectors.sglang.rows import MetadataRows

TRANSPORT = "KVFERRY_TRANSPORT"
HOST = "KVFERRY_HOST"
# A word of the user's for the checkpoint, where the two sides keep it in different forms.
MODEL = "KVFERRY_MODEL"
DEFAULT_TRANSPORT = "auto"


def nothing_computes() -> Waitable | None:
    """On a CPU what was called for is done."""
    return None


def nothing_waits() -> None:
    """And nobody has left anything in a queue."""


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """All that an endpoint of one rank needs.

    ``model`` and ``dtype`` tell one cache from another. ``discovery`` is the bootstrap address
    of a prefill server; a decode server learns each from requests. ``computed`` gives what has
    happened once the GPU has done all that it was given, ``settled`` waits for it.
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
    computed: Callable[[], Waitable | None] = nothing_computes
    settled: Callable[[], None] = nothing_waits


def dtype_of(model: Any) -> str:
    """What a model is computed in; ``model`` is SGLang's ``ModelConfig``."""
    return str(DType.parse(str(model.dtype)))


def model_of(
    model: Any, server_args: Any, environment: Mapping[str, str], draft: Any = None
) -> str:
    """What both sides must have in common, as SGLang serves it; a draft whose cache is carried."""
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
    """The transport that is asked for."""
    return environment.get(TRANSPORT) or DEFAULT_TRANSPORT


def liveness_in(environment: Mapping[str, str]) -> ProtocolConfig:
    """How long a peer may be silent, as the environment says it."""
    config = LIVENESS
    for name in LIVENESS_SETTINGS:
        variable = f"KVFERRY_{name.upper()}"
        said = environment.get(variable)
        if said:
            try:
                config = replace(config, **{name: float(said)})
            except ValueError as error:
                raise InputError(
                    f"{variable} is a number of seconds, such as "
                    f"{getattr(LIVENESS, name):g}, and {said!r:.80} can't be used: {error}"
                ) from None
    return config
