"""Discovery by a static list: conformance, ranks that differ from it, lists in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from discovery.parts import ENOUGH_S

from kvferry.discovery.base import Discovery
from kvferry.discovery.client import DiscoveryClient, discovery_at
from kvferry.discovery.records import (
    DiscoveryFault,
    InstanceView,
)
from kvferry.discovery.static import StaticDiscovery, StaticInstance
from kvferry.errors import InputError
from kvferry.layout import Order, Parallel
from kvferry.testing.discovery import (
    LAYOUT,
    NAME,
    RECORDS,
    FixedCases,
    refused,
)

ADDRESSES = ("127.0.0.1:5000", "tcp://127.0.0.1:5001")
LISTED = StaticInstance(name=NAME, ranks=ADDRESSES, layout=LAYOUT)


class TestStatic(FixedCases):
    def make(self) -> Discovery:
        return StaticDiscovery([LISTED])

    def test_a_view_of_a_list_has_no_incarnations(self) -> None:
        with DiscoveryClient(self.make()) as client:
            view = client.resolve(NAME, ENOUGH_S)
        assert [rank.incarnation for rank in view.ranks] == [None, None]
        assert view.fingerprint is None

    def test_a_rank_without_an_entry_is_refused(self) -> None:
        stranger = msgspec.structs.replace(RECORDS[0], instance="other")

        async def talk(one: Discovery, two: Discovery) -> None:
            for call in (one.register(stranger, 1.0), one.renew(stranger, 1.0)):
                assert "other" in str(await refused(call))
            assert (await refused(one.withdraw(stranger))).fault is DiscoveryFault.NO_LEASE

        self.run(talk)


# ---------------------------------------------------------------- ranks that differ from the list


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"instance": "other"}, "has no instance 'other', only prefill-0"),
        ({"control": "tcp://127.0.0.1:5009"}, "but static list says tcp://127.0.0.1:5000"),
        ({"control": "tcp://127.0.0.2:5000"}, "set host and port in EndpointConfig"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, page_tokens=64)},
            "another layout .TP2, page 64, NHD. than static list says .TP2, page 16, NHD.",
        ),
        ({"fingerprint": "other"}, "has the model 'other', but static list says 'model'"),
    ],
)
def test_a_rank_that_differs_from_its_entry_is_refused(changes: dict[str, Any], told: str) -> None:
    discovery = StaticDiscovery([msgspec.structs.replace(LISTED, model="model")])
    discovery.check(RECORDS[0])
    with DiscoveryClient(discovery) as client, pytest.raises(InputError, match=told):
        client.register(msgspec.structs.replace(RECORDS[0], **changes))


def test_a_list_may_use_host_names() -> None:
    ranks = ("localhost:5000", "localhost:5001")
    StaticDiscovery([msgspec.structs.replace(LISTED, ranks=ranks)]).check(RECORDS[0])


# ---------------------------------------------------------------- files


def listed(path: Path) -> InstanceView:
    with DiscoveryClient(f"static:{path}") as client:
        return client.resolve(NAME, ENOUGH_S)


def test_a_list_is_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(msgspec.json.encode({"instances": [LISTED]}))
    view = listed(path)
    assert view.layout == LAYOUT
    assert [rank.control for rank in view.ranks] == [record.control for record in RECORDS]


TOML = """
[[instances]]
name = "prefill-0"
model = "demo@1"
ranks = ["10.0.0.2:7100", "[fd00::3]:7100"]
layout = {config = "config.json", tp = 2, page_tokens = 32, group_pages = {kv = 8}, order = "hnd"}
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def test_a_list_is_read_from_toml_with_a_model_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "cluster.toml").write_text(TOML)
    view = listed(tmp_path / "cluster.toml")
    assert (view.fingerprint, view.ranks[1].control) == ("demo@1", "tcp://[fd00::3]:7100")
    assert view.layout.sharding == Parallel(tp=2)
    assert (view.layout.page_tokens, view.layout.order) == (32, Order.HND)
    assert view.layout.group_pages == (("kv", 8),)
    assert (view.layout.spec.num_layers, view.layout.spec.groups[0].units) == (2, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: "", "`instances`"),
        (lambda text: text + "[", "Invalid|invalid|Expected"),
        (lambda text: text.replace("model =", "modell ="), "modell"),
        (lambda text: text.replace('"10.0.0.2:7100", ', ""), "1 addresses, but .* 2 ranks"),
        (
            lambda text: text.replace("10.0.0.2:7100", "10.0.0.2"),
            "'10.0.0.2' is not a control",
        ),
        (lambda text: text.replace("10.0.0.2:7100", "10.0.0.2:0"), "is not a control address"),
        (lambda text: text.replace("prefill-0", "two words"), "is not a valid instance name"),
        (lambda text: text + text, "names 'prefill-0' twice"),
        (lambda text: text.replace("tp = 2", "tp = 3"), "tp=3 neither divides"),
        (lambda text: text.replace("tp = 2", 'tp = "2"'), "Expected `int`"),
        (lambda text: text.replace("config.json", "gone.json"), "gone.json"),
    ],
)
def test_an_invalid_list_is_refused(
    tmp_path: Path, change: Callable[[str], str], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "cluster.toml"
    path.write_text(change(TOML))
    with pytest.raises(InputError, match=rf"cluster.toml' cannot be used: .*({told})") as error:
        discovery_at(f"static:{path}")
    assert "\n" not in str(error.value)


def test_a_missing_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone.toml' cannot be used: No such file"):
        discovery_at(f"static:{tmp_path / 'gone.toml'}")
