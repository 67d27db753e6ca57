"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvferry import InputError
from kvferry.connectors.liveness import LIVENESS, LIVENESS_SETTINGS
from kvferry.connectors.sglang.settings import liveness_in, transport_in


def test_the_environment_names_the_transport() -> None:
    assert transport_in({}) == "auto"
    assert transport_in({"KVFERRY_TRANSPORT": "mooncake"}) == "mooncake"


def test_the_environment_sets_liveness_timeouts() -> None:
    assert liveness_in({}) == liveness_in({"KVFERRY_SILENCE_S": ""}) == LIVENESS
    assert LIVENESS.silence_s == 20
    given = {name: 30.0 + index for index, name in enumerate(LIVENESS_SETTINGS)}
    said = {f"KVFERRY_{name.upper()}": str(seconds) for name, seconds in given.items()}
    assert liveness_in(said) == replace(LIVENESS, **given)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("long", "could not convert"),
        ("0", "must be above 0 and finite"),
        ("nan", "must be above 0 and finite"),
        ("1.5", "must be at least twice heartbeat_s"),
    ],
)
def test_a_bad_timeout_is_rejected_with_a_remedy(said: str, why: str) -> None:
    remedy = f"KVFERRY_SILENCE_S must be a number of seconds, such as 20, not {said!r}"
    with pytest.raises(InputError, match=f"{remedy}: .*{why}"):
        liveness_in({"KVFERRY_SILENCE_S": said})


def test_docs_list_every_timeout() -> None:
    page = (Path(__file__).parents[3] / "docs" / "connectors" / "sglang.md").read_text()
    assert [name for name in LIVENESS_SETTINGS if f"`KVFERRY_{name.upper()}`" not in page] == []
