from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvferry import InputError, ProofMode
from kvferry.connectors.settings import LIVENESS, LIVENESS_SETTINGS
from kvferry.connectors.vllm.compat import TESTED_VERSIONS
from kvferry.connectors.vllm.settings import (
    ConnectorSettings,
    read_settings,
)

LEAST = {"discovery": "http://10.0.0.1:7400", "instance": "prefill-0"}


def test_required_settings() -> None:
    settings = read_settings(LEAST)
    assert (settings.transport, settings.layers) == ("auto", "auto")
    config = settings.rank_config()
    assert (config.deadline_s, config.protocol.silence_s, config.discovery_timeout_s) == (
        120,
        20,
        10,
    )


def test_liveness_timeouts_can_be_set() -> None:
    assert read_settings(LEAST).rank_config().protocol == LIVENESS
    given = {name: 30.0 + index for index, name in enumerate(LIVENESS_SETTINGS)}
    config = read_settings({**LEAST, **given}).rank_config().protocol
    assert config == replace(LIVENESS, **given)


def test_proof_of_content_can_be_set() -> None:
    assert read_settings(LEAST).rank_config().proof is ProofMode.SAMPLED
    assert read_settings({**LEAST, "proof": "full"}).rank_config().proof is ProofMode.FULL


def test_discovery_timeout_is_at_most_the_deadline() -> None:
    assert read_settings({**LEAST, "deadline_s": 3}).rank_config().discovery_timeout_s == 3


def test_each_replica_is_an_instance() -> None:
    settings = read_settings(LEAST)
    assert settings.instance_name(None) == "prefill-0"
    assert settings.instance_name(1) == "prefill-0-dp1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rendevous": "x"}, "has no 'rendevous'; it takes discovery, instance"),
        ({"discovery": "10.0.0.1"}, "is not a discovery URL; give one such as http://"),
        ({"discovery": 7}, r"\$\.discovery"),
        ({"instance": ""}, r"\$\.instance"),
        ({"deadline_s": 0}, r"\$\.deadline_s"),
        ({"silence_s": 1.5}, "silence_s=1.5 must be at least twice heartbeat_s"),
        ({"silence_s": -1}, "silence_s must be above 0 and finite, not -1"),
        ({"silence_s": "long"}, r"\$\.silence_s"),
        ({"unresponsive_s": 0}, "unresponsive_s must be above 0 and finite, not 0"),
        ({"proof": "some"}, r"\$\.proof"),
        ({"options": {"a": 1}}, r"\$\.options"),
    ],
)
def test_invalid_value_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_settings({**LEAST, **change})


def test_missing_value_is_refused() -> None:
    with pytest.raises(InputError, match="it takes discovery, such as"):
        read_settings({})


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    settings = read_settings({**LEAST, "key_file": str(tmp_path / "none")})
    with pytest.raises(InputError, match="none"):
        settings.key()


def test_every_setting_and_version_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "connectors" / "vllm.md").read_text()
    assert [name for name in ConnectorSettings.__struct_fields__ if f"`{name}`" not in page] == []
    assert [version for version in TESTED_VERSIONS if f"**{version}**" not in page] == []
