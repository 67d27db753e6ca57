"""The router between clients and well-behaved workers."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from discovery.parts import layout, record
from limited import bounded
from router.fakes import (
    MODEL,
    STREAM,
    WORDS,
    FakeWorker,
    Site,
    Wire,
    hangs,
    refuses,
    site,
    streams_forever,
    until,
)

from kvferry.discovery.client import DiscoveryClient
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.router.options import RouterOptions
from kvferry.router.serving import serving
from kvferry.security.keys import ClusterKey

TEXT = "".join(WORDS)


@bounded
async def test_a_pair_shares_one_room() -> None:
    async with site() as here:
        status, answer = await here.ask(max_tokens=3, temperature=0.5)
        assert (status, answer["choices"][0]["text"]) == (200, TEXT)
        assert answer["kvferry"] == {"source": "transferred"}
        (prompt,), (whole,) = here["p0"].seen, here["d0"].seen
        room = prompt["kvferry"].pop("room")
        assert prompt.pop("kvferry").keys() == {"deadline_s"}
        assert 0 <= room < 1 << 63
        assert whole["kvferry"].pop("deadline_s") == 120
        assert whole.pop("kvferry") == {"room": room, "prefill": "p0"}
        assert prompt == whole
        assert prompt["temperature"] == 0.5


@bounded
async def test_both_workers_sample_with_one_seed() -> None:
    async with site() as here:
        await here.ask()
        await here.ask()
        await here.ask(seed=7)
        seeds = [body["seed"] for body in here["p0"].seen]
        assert seeds == [body["seed"] for body in here["d0"].seen]
        assert seeds[0] != seeds[1]
        assert seeds[2] == 7


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@bounded
async def test_a_stream_is_relayed_unchanged(path: str) -> None:
    async with site() as here:
        body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
        status, headers, data = await here.post(body, path)
        assert (status, headers["Content-Type"], data) == (200, "text/event-stream", STREAM)
        assert (headers["X-Kvferry-Prefill"], headers["X-Kvferry-Decode"]) == ("p0", "d0")
        (prompt,), (whole,) = here["p0"].seen, here["d0"].seen
        assert not {"stream", "stream_options"} & prompt.keys()
        assert whole["stream"] is True


@bounded
async def test_round_robin_alternates() -> None:
    async with site(2, 3, policy="round-robin") as here:
        for _ in range(6):
            await here.ask()
        assert [len(here[name].seen) for name in ("p0", "p1")] == [3, 3]
        assert [len(here[name].seen) for name in ("d0", "d1", "d2")] == [2, 2, 2]


@bounded
async def test_least_loaded_worker_is_chosen() -> None:
    async with site(1, 2, acts={"d0": streams_forever}) as here:
        async with here.http.post(
            f"{here.url}/v1/completions", json={"model": MODEL, "stream": True}
        ) as busy:
            assert busy.headers["X-Kvferry-Decode"] == "d0"
            for _ in range(3):
                await here.ask()
            assert len(here["d1"].seen) == 3
        await here.until_idle()


@bounded
async def test_load_of_other_routers_counts() -> None:
    async with site(1, 2) as here:
        here["d0"].load = 5
        await here["d0"].checked_twice()
        for _ in range(4):
            await here.ask()
        assert (len(here["d0"].seen), len(here["d1"].seen)) == (0, 4)


@bounded
async def test_forty_concurrent_requests() -> None:
    async with site(2, 2) as here:
        answers = await asyncio.gather(*(here.ask(stream=False, prompt=i) for i in range(40)))
        assert all(status == 200 for status, _ in answers)
        rooms = [body["kvferry"]["room"] for body in here["d0"].seen + here["d1"].seen]
        assert len(set(rooms)) == 40
        await here.until_idle()


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@bounded
async def test_a_client_that_leaves_frees_both_workers(stream: bool) -> None:
    async with site(acts={"p0": hangs, "d0": hangs}) as here:
        asking = asyncio.create_task(here.ask(stream=stream))
        await until(lambda: here["p0"].seen and here["d0"].seen)
        asking.cancel()
        await until(lambda: here["p0"].left and here["d0"].left)
        await here.until_idle()


@bounded
async def test_a_client_that_leaves_mid_stream_is_counted() -> None:
    async with site(acts={"d0": streams_forever}) as here:
        url = f"{here.url}/v1/completions"
        async with here.http.post(url, json={"model": MODEL, "stream": True}) as response:
            assert await response.content.readany()
        await until(lambda: here["d0"].left)
        await here.until_idle()
        async with here.http.get(f"{here.url}/metrics") as response:
            metrics = await response.text()
        assert 'requests_total{path="/v1/completions",status="499"} 1.0' in metrics
        assert 'in_flight{role="decode"} 0.0' in metrics


# ---------------------------------------------------------------- what clients get wrong


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"\xff", 400, "invalid_json", None),
        (b"[1]", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        ({"model": 3}, 400, "invalid_value", "model"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"model": MODEL, "stream": "yes"}, 400, "invalid_value", "stream"),
        ({"kvferry": {"room": 1}}, 400, "invalid_value", "kvferry"),
        ({"kvferry": "local"}, 400, "invalid_value", "kvferry"),
        ({"kvferry": {"on_failure": "no"}}, 400, "invalid_value", "kvferry.on_failure"),
        (b"x" * (9 << 20), 413, "too_large", None),
    ],
)
@bounded
async def test_a_bad_body_gets_an_error_document(
    body: object, status: int, code: str, param: str | None
) -> None:
    async with site() as here:
        got, _, data = await here.post(body)
        error = json.loads(data)["error"]
        assert (got, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert not here["p0"].seen
        assert not here["d0"].seen


@bounded
async def test_a_workers_error_is_passed_on() -> None:
    """An overlong prompt is wrong everywhere: nobody else is asked."""
    too_long = refuses(400, None, "too long")
    too_long_error = {"message": "too long", "type": "t", "param": None, "code": None}
    async with site(2, 2, acts=dict.fromkeys(("p0", "p1", "d0", "d1"), too_long)) as here:
        status, answer = await here.ask()
        assert (status, answer["error"]) == (400, too_long_error)
        assert sum(len(worker.seen) for worker in here.workers.values()) == 2
        assert all(worker["up"] for worker in (await here.state()).values())


@bounded
async def test_paths_methods_and_models() -> None:
    async with site() as here:

        async def get(path: str) -> tuple[int, Any]:
            async with here.http.get(f"{here.url}{path}") as response:
                return response.status, await response.json()

        status, listing = await get("/v1/models")
        assert (status, [model["id"] for model in listing["data"]]) == (200, [MODEL])
        assert (await get(f"/v1/models/{MODEL}"))[1]["object"] == "model"
        assert (await get("/v1/models/other"))[1]["error"]["code"] == "model_not_found"
        status, answer = await get("/nothing")
        assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = await get("/v1/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


@bounded
async def test_the_only_model_is_the_default() -> None:
    async with site() as here:
        status, _, _ = await here.post({"prompt": "p"})
        assert status == 200
        assert here["p0"].seen[0]["model"] == here["d0"].seen[0]["model"] == MODEL


@bounded
async def test_each_model_has_its_own_workers() -> None:
    async with site(2, 2) as here:
        here["p1"].model = here["d1"].model = "other"
        await here.until_up("p1", "d1")
        while (await here.state())["d1"]["model"] != "other":
            await asyncio.sleep(0.01)
        await here.ask(model="other")
        await here.ask(model=MODEL)
        assert [body["model"] for body in here["p1"].seen + here["d1"].seen] == ["other"] * 2
        assert [body["model"] for body in here["p0"].seen + here["d0"].seen] == [MODEL] * 2
        status, _, data = await here.post({"prompt": "p"})
        assert (status, json.loads(data)["error"]["code"]) == (400, "model_not_found")


# ---------------------------------------------------------------- the discovery service


@pytest.mark.parametrize("with_key", [False, True])
@bounded
async def test_workers_are_found_by_discovery(
    with_key: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = ClusterKey.new() if with_key else None
    path = tmp_path / "key"
    if key is not None:
        key.write(path)
    wire = Wire()
    workers = [FakeWorker("prefill", "p0", wire), FakeWorker("decode", "d0", wire)]
    for worker in workers:
        await worker.start()
    server = DiscoveryServer(key=key).start()
    client = DiscoveryClient(server.url, key)
    options = RouterOptions(
        port=0, discovery=server.url, key=str(path) if key else None, poll_s=0.05
    )
    async with serving(options) as url, aiohttp.ClientSession() as http:

        async def ask() -> int:
            async with http.post(f"{url}/v1/completions", json={"model": MODEL}) as response:
                return response.status

        assert await ask() == 503
        for worker in workers:
            metadata = {"http": worker.url, "role": worker.role, "instance": worker.name}
            one = record(f"{worker.name}@http", layout=layout(tp=1), metadata=metadata)
            client.register(one, 1.0)
        # One that serves no requests, as a prefill instance's own ranks.
        client.register(record("p0", layout=layout(tp=1)), 1.0)
        while await ask() != 200:
            await asyncio.sleep(0.02)
        assert workers[1].seen[-1]["kvferry"]["prefill"] == "p0"

        # Without it, who was known stays known.
        await asyncio.to_thread(server.stop)
        await until(lambda: "discovery-unreachable" in caplog.text)
        assert await ask() == 200

        # One that leaves while the discovery service is away is noticed all the same.
        await workers[1].stop()
        while await ask() != 503:
            await asyncio.sleep(0.02)
    await asyncio.to_thread(client.close)
    await workers[0].stop()


@bounded
async def test_a_restarted_discovery_service_is_used_again(tmp_path: Any) -> None:
    key, path = ClusterKey.new(), tmp_path / "key"
    key.write(path)
    worker = FakeWorker("decode", "d0", Wire())
    await worker.start()
    server = DiscoveryServer(key=key).start()
    port = urlsplit(server.url).port
    assert port is not None
    options = RouterOptions(port=0, discovery=server.url, key=str(path), poll_s=0.05)
    async with serving(options) as url, aiohttp.ClientSession() as http:
        here = Site(url, {}, http)
        client = DiscoveryClient(server.url, key)
        for again in (False, True):
            if again:
                await asyncio.to_thread(server.stop)
                server = DiscoveryServer(port=port, key=key).start()
            name = f"d{int(again)}@http"
            metadata = {"http": worker.url, "role": "decode", "instance": worker.name}
            if again:
                # Under another address, so that it can only have been heard of now.
                metadata["http"] = worker.url.replace("127.0.0.1", "localhost")
            client.register(record(name, layout=layout(tp=1), metadata=metadata), 1.0)
            while not any(w["url"] == metadata["http"] for w in await here.listed()):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(client.close)
    await asyncio.to_thread(server.stop)
    await worker.stop()
