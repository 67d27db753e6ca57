"""A worker's life: what it says of itself, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reference.driving import PROMPTS
from reference.working import (
    PATIENCE_S,
    Alone,
    Caller,
    Reply,
    apart,
    body_of,
    call,
    hosted,
    options_for,
    started,
)

from kvferry.discovery.http.backend import HttpDiscovery
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.discovery.records import DiscoveryError
from kvferry.errors import InputError, KvferryError
from kvferry.layout.layout import Parallel
from kvferry.reference.models.tiny import TinyKind, make_tiny
from kvferry.reference.worker.instance import run_instance
from kvferry.security.keys import ClusterKey

Models = dict[TinyKind, Path]


# ---------------------------------------------------------------- options


def test_options_survive_the_way_to_another_process(models: Models) -> None:
    options = options_for("decode", models[TinyKind.LLAMA], "http://127.0.0.1:1", Parallel(tp=3))
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "must begin with a letter"),
        ({"name": "two@http"}, "must begin with a letter"),
        ({"name": "x" * 201}, "must begin with a letter"),
        ({"deadline_s": 0}, "deadline_s must be above 0"),
    ],
)
def test_bad_options_are_one_sentence(
    models: Models, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        options_for("decode", models[TinyKind.LLAMA], None, Parallel(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "0.0.0.0"}, "make a cluster key with `kvferry key FILE`"),
        ({"host": "0.0.0.0", "advertise": "127.0.0.1"}, "would let anyone in"),
        ({"host": "no.such.host.invalid"}, "cannot find the host"),
        ({"port": 70000}, "a port is between 0 and 65535"),
        ({"folder": "/nowhere"}, "/nowhere"),
        ({"folder": "/nowhere", "discovery": "http://127.0.0.1:1"}, "cannot read '/nowhere'"),
        ({"engine": {"parallel": Parallel(tp=7)}}, "tp=7"),
        ({"transport": "pigeon", "discovery": "http://127.0.0.1:1"}, "pigeon"),
        ({"key_file": "/nowhere", "discovery": "http://127.0.0.1:1"}, "/nowhere"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_sentence(
    models: Models, changes: dict[str, Any], message: str
) -> None:
    folder = Path(changes.pop("folder", models[TinyKind.LLAMA]))
    discovery = changes.pop("discovery", None)
    options = options_for("decode", folder, discovery, Parallel(), **changes)
    with pytest.raises(KvferryError, match=message) as raised:
        run_instance(options)
    assert "\n" not in str(raised.value)


def test_with_a_key_a_worker_may_be_reached_from_elsewhere(models: Models, tmp_path: Path) -> None:
    """On all addresses only if it says under which one it is reached."""
    key = ClusterKey.new()
    key.write(tmp_path / "key")
    fields = {"host": "0.0.0.0", "key_file": str(tmp_path / "key")}
    folder = models[TinyKind.LLAMA]
    with pytest.raises(InputError, match=r"others cannot reach 0\.0\.0\.0"):
        run_instance(options_for("decode", folder, None, Parallel(), **fields))
    reached = options_for("decode", folder, None, Parallel(), advertise="127.0.0.1", **fields)
    with hosted(reached) as (worker,):
        assert worker.url.startswith("http://127.0.0.1:")
        reply = call(lambda caller: caller.post(worker.url, body_of(PROMPTS[0], 2)), key)
    assert reply.status == 200


def test_a_port_in_use_is_said_before_the_model_is_loaded(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = options_for("decode", Path("/nowhere"), None, Parallel(), port=port)
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"):
            run_instance(options)


def test_checkpoints_differ_by_their_weights(models: Models, tmp_path: Path) -> None:
    same = make_tiny(tmp_path / "same", TinyKind.LLAMA, seed=7)
    other = make_tiny(tmp_path / "other", TinyKind.LLAMA, seed=8)
    ours, equal, unequal = (
        options_for("decode", folder, None, Parallel()).fingerprint
        for folder in (models[TinyKind.LLAMA], same, other)
    )
    assert ours == equal
    assert ours != unequal


# ---------------------------------------------------------------- at the discovery service


def test_workers_register_and_deregister(models: Models, tmp_path: Path) -> None:
    key = ClusterKey.new()
    key.write(tmp_path / "key")

    async def found(url: str, name: str) -> dict[str, str]:
        discovery = HttpDiscovery(url, key)
        try:
            view = await discovery.watch(f"{name}@http", "", 20)
            assert view is not None
            return view.ranks[0].metadata
        finally:
            await discovery.close()

    with DiscoveryServer(key=key) as server:
        options = [
            options_for(
                role,
                models[TinyKind.LLAMA],
                server.url,
                Parallel(),
                key_file=str(tmp_path / "key"),
            )
            for role in ("prefill", "decode")
        ]
        with hosted(*options) as running:
            for option, worker in zip(options, running, strict=True):
                assert asyncio.run(found(server.url, worker.name)) == {
                    "role": str(option.role),
                    "http": worker.url,
                    "model": "model",
                    "instance": worker.name,
                }
            prefill, decode = running
            asked = prefill, decode, 1, body_of(PROMPTS[2])
            _, second = call(lambda caller: caller.pair(*asked), key)
            assert second.told["source"] == "transferred"
        with pytest.raises(DiscoveryError, match="nobody has registered"):
            asyncio.run(gone(server.url, key, running[0].name))


async def gone(url: str, key: ClusterKey, name: str) -> None:
    discovery = HttpDiscovery(url, key)
    try:
        await discovery.watch(f"{name}@http", "", 0)
    finally:
        await discovery.close()


def test_another_checkpoint_is_refused_with_the_reason(models: Models, tmp_path: Path) -> None:
    """Weights that differ are no partners, whatever the names say."""
    other = make_tiny(tmp_path / "other", TinyKind.LLAMA, seed=8)
    with DiscoveryServer() as server:
        options = [
            options_for("prefill", other, server.url, Parallel()),
            options_for("decode", models[TinyKind.LLAMA], server.url, Parallel()),
        ]
        with hosted(*options) as (prefill, decode):
            body = body_of(PROMPTS[1]) | {
                "kvferry": {"room": 1, "prefill": prefill.name, "deadline_s": 20}
            }
            reply = call(lambda caller: caller.post(decode.url, body))
    assert reply.status == 503
    assert "checkpoint is " in reply.document["error"]["message"]


# ---------------------------------------------------------------- the end


def streams_until_told(
    models: Models, number: signal.Signals, max_tokens: int, **changes: Any
) -> list[bytes]:
    """The events of a stream whose worker got a signal after the first. The worker must end."""
    options = options_for("decode", models[TinyKind.LLAMA], None, Parallel(), **changes)

    async def talk(caller: Caller, url: str, pid: int) -> bytes:
        body = body_of(PROMPTS[1], max_tokens=max_tokens) | {"stream": True}
        async with caller.session.post(f"{url}/v1/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            os.kill(pid, number)
            if number is signal.SIGTERM:
                await caller.until(url, lambda told: told["status"] == "draining")
                refused = await caller.post(url, body_of(PROMPTS[0]))
                assert refused.document["error"]["code"] == "worker_draining"
            return first + await response.read()

    with apart(options) as (worker,):
        assert worker.process is not None
        assert worker.process.pid is not None
        raw = call(partial(talk, url=worker.url, pid=worker.process.pid))
        worker.process.join(PATIENCE_S)
        assert worker.process.exitcode == 0
    return [event for event in raw.split(b"\n\n") if event]


def test_sigterm_lets_a_worker_finish(models: Models) -> None:
    told = streams_until_told(models, signal.SIGTERM, 400)
    # A token each, and the end.
    assert len(told) == 401
    assert told[-1] == b"data: [DONE]"


def test_a_worker_drains_no_longer_than_its_limit(models: Models) -> None:
    told = streams_until_told(models, signal.SIGTERM, 1900, drain_s=0.5)
    assert b'"code":"worker_ended"' in told[-1]


def test_sigint_ends_a_worker_and_tells_its_callers(models: Models) -> None:
    told = streams_until_told(models, signal.SIGINT, 1900)
    assert b'"code":"worker_ended"' in told[-1]


def test_sigterm_while_it_starts_leaves_no_process(models: Models) -> None:
    options = options_for("decode", models[TinyKind.LLAMA], None, Parallel(tp=3))
    process, pipe = started(options)
    deadline = time.monotonic() + PATIENCE_S
    while len(ranks := descendants(process.pid)) < 3 and not pipe.poll():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    pipe.close()
    while any(map(os.path.exists, (f"/proc/{pid}" for pid in ranks))):
        assert time.monotonic() < deadline, "a process outlived its worker"
        time.sleep(0.05)


def descendants(pid: int | None) -> list[int]:
    """The processes below one: the ranks, and what starts and tracks them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def signal_to(pid: int) -> None:

    os.kill(pid, signal.SIGTERM)


def test_a_killed_worker_costs_its_requests_and_nothing_else(models: Models) -> None:
    """The whole prefill process, with a transfer under way."""
    long = tuple((5 * i * i + 3 * i) % 256 for i in range(1900))
    with DiscoveryServer() as server:
        slow = {"step_tokens": 32}
        prefill_options = options_for(
            "prefill", models[TinyKind.LLAMA], server.url, Parallel(), engine=slow
        )
        decode_options = options_for("decode", models[TinyKind.LLAMA], server.url, Parallel())

        async def talk(caller: Caller, prefill: Any, decode: Any) -> Reply:
            body = body_of(long, max_tokens=4) | {"kvferry": {"room": 1, "prefill": prefill.name}}
            second = asyncio.create_task(caller.post(decode.url, body))
            await caller.until(decode.url, lambda told: told["rooms"] == 1)
            first = asyncio.create_task(caller.post(prefill.url, body))
            await caller.until(prefill.url, lambda told: told["running"] == 1)
            prefill.process.kill()
            await asyncio.gather(first, return_exceptions=True)
            failed = await second
            assert failed.status == 503
            assert failed.document["error"]["code"] == "kv_transfer_failed"
            # The router's next step: decode computes the prompt itself.
            reply = await caller.post(decode.url, body_of(long, max_tokens=4))
            await caller.idle(decode.url)
            return reply

        with apart(prefill_options) as (prefill,), hosted(decode_options) as (decode,):
            reply = call(partial(talk, prefill=prefill, decode=decode))
    assert reply.status == 200
    assert reply.told["source"] == "recomputed"
    assert [reply.tokens] == Alone(models)(TinyKind.LLAMA, [long], max_tokens=4)
