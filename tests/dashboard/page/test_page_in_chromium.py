"""The page in a real Chromium: it shows what the API returns, and loads nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from endpoint.fleets import HEADS, layout
from telemetry.scenes import Scene, failures

from kvferry.discovery.http.server import DiscoveryServer
from kvferry.plan import Request
from kvferry.security.keys import ClusterKey
from kvferry.security.tokens import make_token
from kvferry.testing.fleet import Fleet, FleetSide

pytestmark = pytest.mark.page
sync_api: Any = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert errors == []


# The page's data attributes and figures.
READ = """() => ({
  at: document.body.dataset.at,
  ranks: Object.fromEntries([...document.querySelectorAll("[data-rank]")].map(
    (tile) => [tile.dataset.rank, tile.dataset.state])),
  rooms: [...document.querySelectorAll("#open-rooms [data-room]")].map((row) => row.dataset.room),
  slow: [...document.querySelectorAll("#slow-rooms [data-room]")].map((row) => row.dataset.room),
  failures: [...document.querySelectorAll("#failures .why")].map((why) => why.textContent),
  links: [...document.querySelectorAll("[data-link]")].map((row) => row.dataset.link).sort(),
  open: document.getElementById("open").textContent,
})"""


def told(view: dict[str, Any]) -> dict[str, Any]:
    """Return what the page should show for a document."""
    ends = [
        [link[end].rpartition("/")[0] for end in ("source", "target")] for link in view["links"]
    ]
    return {
        "at": str(view["at"]),
        "ranks": {
            f"{one['name']}/{rank['rank']}": rank["state"]
            for one in view["instances"]
            for rank in one["ranks"]
        },
        "rooms": [room["room"] for room in view["rooms"][:12]],
        "slow": [room["room"] for room in view["slow"][:12]],
        "failures": [one["reason"] for one in view["failures"][:8]],
        "links": sorted({" → ".join(pair) for pair in ends}),
        "open": str(view["num_open"]),
    }


def seen(page: Any) -> dict[str, Any]:
    """Wait until the page shows the next response; check it and return what is shown."""
    with page.expect_response("**/kvferry/cluster") as caught:
        pass
    document = caught.value.json()
    page.wait_for_function("(at) => document.body.dataset.at === at", arg=str(document["at"]))
    shown: dict[str, Any] = page.evaluate(READ)
    if shown["at"] == str(document["at"]):
        assert shown == told(document)
    return shown


def eventually_seen(page: Any, wanted: Any) -> dict[str, Any]:
    for _ in range(60):
        shown = seen(page)
        if wanted(shown):
            return shown
    raise AssertionError(f"it was never seen: {shown}")


def test_page_follows_the_api_while_rooms_flow_and_a_rank_dies(page: Any) -> None:
    sides = [
        FleetSide("prefill", layout(HEADS, 4, tp=2), 40),
        FleetSide("decode", layout(HEADS, 4), 40),
    ]
    with Fleet(*sides, transport="shm") as fleet:
        page.goto(fleet.url)
        everybody = {"prefill/0": "up", "prefill/1": "up", "decode/0": "up"}
        eventually_seen(page, lambda shown: shown["ranks"] == everybody)
        for i in range(4):
            fleet.carry(f"room-{i}", Request(16), seed=i)
            seen(page)
        eventually_seen(page, lambda shown: "prefill → decode" in shown["links"])
        eventually_seen(page, lambda shown: len(shown["slow"]) == 4)
        fleet.receive("stays", "decode", Request(16), deadline_s=60.0)
        eventually_seen(page, lambda shown: shown["rooms"] == ["stays"])
        fleet.sources[1].kill()
        shown = eventually_seen(page, lambda shown: shown["ranks"]["prefill/1"] != "up")
        assert shown["ranks"]["prefill/0"] == "up"
        eventually_seen(page, lambda shown: any("prefill/1" in why for why in shown["failures"]))


def test_waterfall_and_plan_open_and_close_with_the_keyboard(page: Any) -> None:
    with DiscoveryServer() as server:
        scene = Scene(server.url, {"p": 2}, {"d": 1})
        scene.flows = True
        scene.failures = failures()
        page.goto(server.url)
        scene.tell()
        button = page.locator("#slow-rooms button").first
        button.wait_for()
        button.focus()
        page.keyboard.press("Enter")
        for _ in range(60):
            scene.tell()
            if page.locator("#picture .wf").count():
                break
        page.locator("#picture .wf").wait_for()
        assert "done after" in page.locator("#picture").inner_text()
        page.keyboard.press("Escape")
        assert not page.evaluate("document.getElementById('detail').open")
        page.locator("#links button").first.focus()
        page.keyboard.press("Enter")
        page.locator("#picture svg.kvf").wait_for()
        assert page.evaluate("document.activeElement.closest('dialog') !== null")


def test_page_asks_for_a_token_in_a_cluster_with_a_key(page: Any) -> None:
    key = ClusterKey.new()
    with DiscoveryServer(key=key) as server:
        page.goto(server.url)
        page.locator("#token").wait_for()
        page.fill("#token", "kvr1.1.00")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "document.getElementById('token-why').textContent.includes('not a read-only token')"
        )
        page.fill("#token", make_token(key.http, 4e9))
        page.keyboard.press("Enter")
        page.wait_for_function("!document.getElementById('ask').open")
        page.locator("#nobody").wait_for()


@pytest.mark.parametrize("size", [(390, 800), (1400, 900)])
def test_page_fits_the_window_and_loads_from_one_host(browser: Any, size: tuple[int, int]) -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    with DiscoveryServer() as server:
        scene = Scene(server.url, {f"p{i}": 8 for i in range(4)}, {"d0": 16, "d1": 16})
        scene.flows = True
        scene.tell()
        page.goto(server.url)
        page.locator("[data-rank]").nth(63).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert asked == {urlsplit(server.url).netloc}
    page.close()


def test_page_files_name_no_other_host() -> None:
    folder = Path(__file__).parents[3] / "src" / "kvferry" / "dashboard" / "page"
    for file in folder.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file
        assert "https://" not in text, file
