"""docs/discovery.md agrees with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from discovery.test_static import CONFIG

from kvferry.discovery import client, records, registry
from kvferry.discovery.http import backend, gate, messages, server, service, waiters
from kvferry.discovery.static import StaticDiscovery
from kvferry.security import signing

TEXT = (Path(__file__).parents[2] / "docs" / "discovery.md").read_text()


def test_every_error_is_documented() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d{3}) \|", TEXT, re.MULTILINE))
    assert rows == {fault.value: str(status) for fault, status in gate.STATUS.items()}


def test_every_route_is_documented() -> None:
    app = service.DiscoveryService(None, 0.0).application()
    routes = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource}
    named = {
        (method, path)
        for method, path in re.findall(r"^\| `([A-Z]+) ([^?`]+)[?`]", TEXT, re.MULTILINE)
    }
    assert named == {route for route in routes if route[0] != "HEAD"}


def test_every_field_is_documented() -> None:
    for kind in (records.RankRecord, records.InstanceView, records.RankView, records.Summary):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in TEXT


def test_limits_agree() -> None:
    assert f"{registry.MAX_INSTANCES}, {registry.MAX_RECORDS}" in TEXT
    assert f"{service.MAX_WAIT_S:g} s, {waiters.MAX_WAITING}" in TEXT
    assert gate.MAX_BODY_BYTES == 1 << 20
    assert signing.MAX_NONCES == 1 << 20
    assert signing.TOLERANCE_S == 300
    assert (messages.MIN_LEASE_S, messages.MAX_LEASE_S, client.LEASE_S) == (0.2, 300.0, 10.0)
    assert (backend.MOST_RENEWAL_S, server.SETTLE_S) == (5.0, 30.0)


def test_the_example_of_a_static_list_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT.split("```toml\n")[1].split("```")[0])
    with client.DiscoveryClient(StaticDiscovery.read(path)) as reader:
        view = reader.resolve("prefill-0", 30.0)
    assert view.layout.num_ranks == len(view.ranks) == 2
    for name in ("dtype", "tp", "pp", "cp", "stages", "page_tokens", "group_pages", "order"):
        assert f"`{name}`" in TEXT
