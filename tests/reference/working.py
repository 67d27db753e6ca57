"""Workers in processes of their own, and a caller that asks them over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
from reference.driving import ask, engine_of, small

from kvferry.errors import KvferryError
from kvferry.layout.layout import Parallel
from kvferry.reference.engine.requests import EngineRequest
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.options import InstanceOptions
from kvferry.reference.ranks.rank import MakeExtension
from kvferry.reference.worker.instance import EngineInstance, run_instance
from kvferry.reference.worker.service import EngineService
from kvferry.router.worker_pool import WorkerRole
from kvferry.security.keys import ClusterKey
from kvferry.security.signing import Introduction, new_nonce, sign

# The machine may be busy with other things.
PATIENCE_S = 90.0
MODEL = "model"
PRELOAD = ["kvferry.reference.worker.instance", "kvferry.reference.ranks.preload"]
T = TypeVar("T")


class Worker(NamedTuple):
    """A running worker; ``service`` where it runs in this process, else its ``process``."""

    name: str
    url: str
    service: EngineService | None = None
    end: Callable[[], None] = lambda: None
    process: BaseProcess | None = None


def options_for(
    role: str, folder: Path, discovery: str | None, parallel: Parallel, **changes: Any
) -> InstanceOptions:
    """Options under which tests are quick and limits are near."""
    engine = {"parallel": parallel} | changes.pop("engine", {})
    # Starting every transport that there is takes longer than most tests.
    usual = {"model": MODEL, "transport": "shm"}
    fields: dict[str, Any] = usual | changes
    return InstanceOptions(
        role=WorkerRole(role),
        name=fields.pop("name", f"{role}-{os.urandom(4).hex()}"),
        folder=str(folder),
        engine=small(**engine),
        discovery=discovery,
        **fields,
    )


def worker_main(options: InstanceOptions, pipe: Connection) -> None:
    """The process of a worker. Tells its URL, or why there is none."""
    try:
        run_instance(options, ready=lambda url: pipe.send(("ready", url)))
    except KvferryError as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def started(options: InstanceOptions) -> tuple[BaseProcess, Connection]:
    """A worker's process, and where it says that it is ready."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=worker_main, args=(options, theirs), name=options.name)
    process.start()
    theirs.close()
    return process, ours


@contextlib.contextmanager
def apart(*options: InstanceOptions) -> Iterator[list[Worker]]:
    """Each in a process of its own, started side by side."""
    children: list[tuple[BaseProcess, Connection]] = []
    try:
        for one in options:
            children.append(started(one))
        running = []
        for one, (process, pipe) in zip(options, children, strict=True):
            assert pipe.poll(PATIENCE_S), f"{one.name} does not start"
            word, text = pipe.recv()
            assert word == "ready", text
            running.append(Worker(one.name, text, process=process))
        yield running
    finally:
        for process, _ in children:
            process.terminate()
        for process, pipe in children:
            process.join(30)
            pipe.close()
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def hosted(
    *options: InstanceOptions,
    extend: MakeExtension | Mapping[str, MakeExtension] | None = None,
) -> Iterator[list[Worker]]:
    """All in this process but for their ranks above 0; at most one may have such.

    ``extend`` replaces the extension of all, or of those whose names it has.
    """
    here = asyncio.new_event_loop()
    thread = threading.Thread(target=here.run_forever, name="hosted", daemon=True)
    thread.start()

    def run(step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, here).result(PATIENCE_S)

    def ended(service: EngineService) -> None:
        run(service.stop())

    # The ranks' server has everything loaded that the first instance's ranks need.
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    instances: list[EngineInstance] = []
    try:
        running = []
        for one in options:
            mine = extend.get(one.name) if isinstance(extend, Mapping) else extend
            instances.append(EngineInstance(one, mine))
            url, service = run(instances[-1].start()), instances[-1].service
            running.append(Worker(one.name, url, service, partial(ended, service)))
        yield running
    finally:
        for instance in instances:
            run(instance.stop())
        here.call_soon_threadsafe(here.stop)
        thread.join(10)
        here.close()


class Neighbour:
    """A process beside this one that runs one worker after another.

    The second and all others start quickly: it has everything loaded, and so has the
    server of its ranks.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=neighbour_main, args=(theirs,), name="neighbour")
        self._process.start()
        theirs.close()

    @contextlib.contextmanager
    def runs(self, options: InstanceOptions) -> Iterator[Worker]:
        """A worker over there."""
        self._pipe.send(options)
        yield Worker(options.name, self._heard())
        self._pipe.send(None)
        assert self._heard() == ""

    def _heard(self) -> str:
        assert self._pipe.poll(PATIENCE_S), "the neighbour is silent"
        word, text = self._pipe.recv()
        assert word == "ready", text
        return str(text)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            raise AssertionError("the neighbour did not end")


def neighbour_main(pipe: Connection) -> None:
    """Until the other end of the pipe is closed, also in the middle of a worker's life."""
    with contextlib.suppress(EOFError):
        while True:
            options = pipe.recv()
            try:
                with hosted(options) as (worker,):
                    pipe.send(("ready", worker.url))
                    pipe.recv()
            except KvferryError as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"))
            else:
                pipe.send(("ready", ""))


class Alone:
    """The answers of an engine of one rank that runs alone."""

    def __init__(self, models: Mapping[TinyKind, Path]) -> None:
        self._models = models
        self._known: dict[tuple[TinyKind, tuple[int, ...]], list[int]] = {}

    def __call__(
        self, kind: TinyKind, prompts: Sequence[tuple[int, ...]], max_tokens: int = 12
    ) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (kind, prompt) not in self._known]
        if new:
            asked = [
                EngineRequest(id=f"{i}", prompt=prompt, max_tokens=max_tokens, ignore_end=True)
                for i, prompt in enumerate(new)
            ]
            with engine_of(self._models[kind]) as engine:
                answers = ask(engine, asked)
            self._known |= {(kind, p): a.tokens for p, a in zip(new, answers, strict=True)}
        return [self._known[kind, prompt][:max_tokens] for prompt in prompts]


# ---------------------------------------------------------------- asking


class Reply(NamedTuple):
    """The response to one request."""

    status: int
    document: dict[str, Any]

    @property
    def tokens(self) -> list[int]:
        return list(self.document["choices"][0]["token_ids"])

    @property
    def told(self) -> dict[str, Any]:
        return dict(self.document["kvferry"])


class Caller:
    """Asks workers, as a router would: with a ``key``, what it asks is signed."""

    def __init__(self, session: aiohttp.ClientSession, key: ClusterKey | None = None) -> None:
        self.session = session
        self.key = key

    async def post(self, url: str, body: dict[str, Any], path: str = "completions") -> Reply:
        data = msgspec.json.encode(body)
        headers = await self.signed(url, "POST", f"/v1/{path}", data)
        return await self.send(url, "POST", f"/v1/{path}", data, headers)

    async def send(
        self, url: str, method: str, path: str, data: bytes, headers: dict[str, str]
    ) -> Reply:
        """One request as it stands."""
        kind = {"Content-Type": "application/json"}
        asked = self.session.request(method, url + path, data=data, headers=kind | headers)
        async with asked as response:
            body = await response.read()
            return Reply(response.status, msgspec.json.decode(body) if body else {})

    async def signed(self, url: str, method: str, path: str, data: bytes = b"") -> dict[str, str]:
        """The header that lets a request in, for the worker that is there now."""
        if self.key is None:
            return {}
        nonce = new_nonce()
        told = msgspec.convert(await self.health(url, f"?nonce={nonce}"), Introduction)
        assert told.fits(self.key.http, nonce)
        signature = sign(self.key.http, told.life, method, path, data, time.time())
        return {"Authorization": signature}

    async def health(self, url: str, query: str = "") -> dict[str, Any]:
        async with self.session.get(f"{url}/healthz{query}") as response:
            told: dict[str, Any] = await response.json()
            return told

    async def until(
        self, url: str, holds: Callable[[dict[str, Any]], bool], seconds: float = 30
    ) -> dict[str, Any]:
        """Wait until a worker's health shows something."""
        deadline = time.monotonic() + seconds
        while not holds(told := await self.health(url)):
            assert time.monotonic() < deadline, told
            await asyncio.sleep(0.02)
        return told

    async def idle(self, url: str) -> dict[str, Any]:
        """Wait until nothing of any request is left."""
        return await self.until(url, is_idle)

    async def pair(
        self, prefill: Worker, decode: Worker, room: int, body: dict[str, Any], **ticket: Any
    ) -> tuple[Reply, Reply]:
        """One request to both halves at once."""
        here = body | {"kvferry": {"room": room, "deadline_s": PATIENCE_S} | ticket}
        there = body | {"kvferry": here["kvferry"] | {"prefill": prefill.name} | ticket}
        first, second = await asyncio.gather(
            self.post(prefill.url, here), self.post(decode.url, there)
        )
        return first, second


async def all_at_once(
    caller: Caller, pair: Sequence[Worker], prompts: Sequence[tuple[int, ...]], room: int = 0
) -> list[Reply]:
    """Decode's answers, after everything has been given back on both sides."""
    prefill, decode = pair
    both = await asyncio.gather(
        *(
            caller.pair(prefill, decode, room + i, body_of(prompt))
            for i, prompt in enumerate(prompts)
        )
    )
    for first, second in both:
        assert (first.status, second.status) == (200, 200), both
        assert second.told["source"] == "transferred"
        assert second.tokens[:1] == first.tokens
    for worker in pair:
        await caller.idle(worker.url)
    return [second for _, second in both]


async def carried(caller: Caller, worker: Worker) -> int:
    """The bytes that a worker's ranks have written so far."""
    told = await caller.health(worker.url)
    return sum(told["carried_bytes"].values())


def is_idle(told: dict[str, Any]) -> bool:
    names = ("running", "waiting", "rooms", "used_pages")
    return not any(told[name] for name in names)


def body_of(prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """A greedy question in token ids, answered in token ids."""
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


@contextlib.asynccontextmanager
async def calling(key: ClusterKey | None = None) -> AsyncIterator[Caller]:
    timeout = aiohttp.ClientTimeout(total=2 * PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Caller(session, key)


def call(conversation: Callable[[Caller], Awaitable[Any]], key: ClusterKey | None = None) -> Any:
    """Run a conversation."""

    async def talk() -> Any:
        async with calling(key) as caller:
            return await conversation(caller)

    return asyncio.run(talk())


def events(raw: bytes) -> list[dict[str, Any]]:
    """The documents of a stream, which must end as it should."""
    lines = [line for line in raw.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), raw
    assert lines[-1] == "data: [DONE]", raw
    return [msgspec.json.decode(line[6:]) for line in lines[:-1]]
