"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvferry import InputError, ProofMode
from kvferry.connectors.settings import LIVENESS
from kvferry.connectors.sglang.settings import ServerSettings, read_settings, variable_of

ALL = {
    "KVFERRY_KEY_FILE": "/etc/kvferry.key",
    "KVFERRY_DISCOVERY": "etcd://10.0.0.9:2379/kvferry",
    "KVFERRY_HOST": "10.0.0.1",
    "KVFERRY_TRANSPORT": "mooncake",
    "KVFERRY_MODEL": "m",
    "KVFERRY_DEADLINE_S": "90",
    "KVFERRY_SILENCE_S": "30.5",
    "KVFERRY_UNRESPONSIVE_S": "70",
    "KVFERRY_STAGING_BYTES": "16777216",
    "KVFERRY_PROOF": "full",
    "KVFERRY_OPTIONS": '{"backend": "UCX"}',
}


def test_an_empty_environment_sets_nothing() -> None:
    assert read_settings({}) == read_settings({"KVFERRY_SILENCE_S": ""}) == ServerSettings()
    config = ServerSettings().endpoint_config(host="h", deadline_s=300)
    assert (config.host, config.deadline_s, config.protocol) == ("h", 300, LIVENESS)


def test_each_setting_has_a_variable() -> None:
    fields = {field.name for field in msgspec.structs.fields(ServerSettings)}
    assert {variable_of(name) for name in fields} == set(ALL)
    settings = read_settings(ALL)
    unset = ServerSettings()
    assert [name for name in fields if getattr(settings, name) == getattr(unset, name)] == []
    config = settings.endpoint_config(host="h", deadline_s=300)
    assert (config.host, config.deadline_s, config.staging_bytes) == ("10.0.0.1", 90, 16 << 20)
    assert (config.protocol.silence_s, config.protocol.unresponsive_s) == (30.5, 70)
    assert config.options == {"backend": "UCX"}
    assert config.proof is ProofMode.FULL


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("KVFERRY_SILENCE_S", "long", "Expected `float`, got `str`; correct it or unset it"),
        ("KVFERRY_SILENCE_S", "0", "must be above 0 and finite"),
        ("KVFERRY_SILENCE_S", "1.5", "must be at least twice heartbeat_s"),
        ("KVFERRY_DISCOVERY", "10.0.0.9:2379", "http://|etcd://"),
        ("KVFERRY_DEADLINE_S", "-1", "> 0.0; correct it or unset it"),
        ("KVFERRY_DEADLINE_S", "inf", "must be above 0 and finite"),
        ("KVFERRY_STAGING_BYTES", "64M", "correct it or unset it"),
        ("KVFERRY_STAGING_BYTES", "-1", ">= 0; correct it or unset it"),
        ("KVFERRY_PROOF", "some", "Invalid enum value 'some'; correct it or unset it"),
        ("KVFERRY_OPTIONS", "UCX", "malformed.*; correct it or unset it"),
        ("KVFERRY_OPTIONS", '{"a": 1}', "Expected `str`, got `int`"),
    ],
)
def test_a_bad_value_is_rejected_with_a_remedy(name: str, said: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_settings({name: said})


def test_docs_list_every_setting() -> None:
    page = (Path(__file__).parents[3] / "docs" / "connectors" / "sglang.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in page] == []
