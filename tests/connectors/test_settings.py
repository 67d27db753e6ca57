"""One definition of what both connectors can be told."""

from __future__ import annotations

import msgspec

from kvferry.connectors.settings import LIVENESS_SETTINGS, TransferSettings
from kvferry.connectors.sglang.settings import ServerSettings
from kvferry.connectors.vllm.settings import ConnectorSettings


def test_connectors_share_names_types_and_defaults() -> None:
    shared = _fields(TransferSettings)
    for kind in (ServerSettings, ConnectorSettings):
        own = _fields(kind)
        assert {name: own[name] for name in shared} == shared
    assert set(LIVENESS_SETTINGS) <= set(shared)


def _fields(kind: type[msgspec.Struct]) -> dict[str, tuple[object, object]]:
    return {field.name: (field.type, field.default) for field in msgspec.structs.fields(kind)}
