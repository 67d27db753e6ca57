"""Dialects: what a router says to the workers of each engine, and what it makes of their words.

Both workers of a pair are asked at once, with one room. Decisions are pure; only ``ask_health``
asks anybody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import aiohttp
import msgspec

from kvferry.router.bodies import ID_BITS, STREAM_FIELDS, ClientAsk
from kvferry.router.options import EngineName, replicated
from kvferry.router.upstream import TRANSFER_FAILED, Failed, FaultDomain, Opened
from kvferry.router.worker_pool import Health, Unwell, Worker, WorkerRole

PARAMS = "kv_transfer_params"
# By which vLLM's API server is told the data-parallel replica.
REPLICA_HEADER = "X-data-parallel-rank"
# How vLLM's answers and streams begin where its engine gave a request up.
ERROR_EVENT = b'data: {"error"'
# In vLLM's answers once its engine process has ended.
ENGINE_DEAD = "EngineCore encountered an issue"
# What asks for more than the prompt, and for more than one answer.
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", *STREAM_FIELDS)


class EngineAdapter(ABC):
    """One engine's. ``needs_seed``: both workers sample; ``gives_up``: rooms can be called off."""

    needs_seed = False
    gives_up = False

    @abstractmethod
    def for_prefill(self, ask: ClientAsk, room: int, deadline_s: float) -> bytes:
        """The prompt's half."""

    @abstractmethod
    def for_decode(self, ask: ClientAsk, room: int, prefill: str, deadline_s: float) -> bytes:
        """The answer's half."""

    @abstractmethod
    def whole(self, ask: ClientAsk) -> bytes:
        """Prompt and answer at one worker."""

    @abstractmethod
    async def ask_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> Health:
        """How a worker is, by its own words."""

    def headers(self, prefill: str, room: int) -> dict[str, str]:
        """What the prompt's half needs beside its body."""
        return {}

    def splits(self, ask: ClientAsk) -> bool:
        """Whether a request can be computed by two workers."""
        return True

    def judged(self, outcome: Opened | Failed) -> Opened | Failed:
        """What became of an attempt that two workers took part in."""
        return outcome


class KvferryAdapter(EngineAdapter):
    """The reference engine's, ``docs/serving.md``."""

    needs_seed = True
    gives_up = True

    def for_prefill(self, ask: ClientAsk, room: int, deadline_s: float) -> bytes:
        """Nobody listens to it."""
        return ask.for_prefill(room, deadline_s)

    def for_decode(self, ask: ClientAsk, room: int, prefill: str, deadline_s: float) -> bytes:
        """With where the prompt's cache comes from."""
        return ask.for_decode(room, prefill, deadline_s)

    def whole(self, ask: ClientAsk) -> bytes:
        """As the client sent it."""
        return ask.whole()

    async def ask_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> Health:
        """At ``/healthz``, which also proves that the worker has the cluster's key."""
        url = f"{worker.url}/healthz?nonce={nonce}"
        async with session.get(url, allow_redirects=False) as response:
            health = msgspec.json.decode(await response.read(), type=Health)
            if response.status != 200:
                raise Unwell(health.problem or f"it is not well (status {response.status})")
            return health


class ModelEntry(msgspec.Struct, frozen=True):
    """One of vLLM's models; adapters have others as parents."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """What is read of vLLM's ``/v1/models``."""

    data: list[ModelEntry]


class VllmAdapter(EngineAdapter):
    """vLLM's, with kvferry's connector on both sides (``docs/connectors/vllm.md``).

    Decode computes the prompt's last token again and samples by itself, so that prefill need not.
    Of a prefill's data-parallel replicas behind one address (``NAME*N``) the room's number decides.
    """

    def for_prefill(self, ask: ClientAsk, room: int, deadline_s: float) -> bytes:
        """One token, to nobody."""
        body = {key: value for key, value in ask.body.items() if key not in LIMITS}
        limit = "max_completion_tokens" if "messages" in body else "max_tokens"
        params = {"do_remote_decode": True, "kvferry": {"room": room}}
        return msgspec.json.encode(body | {limit: 1, PARAMS: params})

    def for_decode(self, ask: ClientAsk, room: int, prefill: str, deadline_s: float) -> bytes:
        """With the room in which that instance computes the prompt."""
        own = {"room": room, "prefill": instance_of(prefill, room)}
        params = {"do_remote_prefill": True, "kvferry": own}
        return msgspec.json.encode(ask.body | {PARAMS: params})

    def headers(self, prefill: str, room: int) -> dict[str, str]:
        """Which replica computes."""
        _, num_replicas = replicated(prefill)
        return {} if num_replicas == 1 else {REPLICA_HEADER: str(room % num_replicas)}

    def whole(self, ask: ClientAsk) -> bytes:
        """Rooms are the router's to choose, so a client's are left out."""
        return msgspec.json.encode({k: v for k, v in ask.body.items() if k != PARAMS})

    def splits(self, ask: ClientAsk) -> bool:
        """One prompt and one answer: vLLM would take several for as many requests of one room."""
        return ask.body.get("n") in (None, 1) and not _several(ask.body.get("prompt"))

    def judged(self, outcome: Opened | Failed) -> Opened | Failed:
        """Decode says of a failed transfer only that something went wrong.

        That the whole engine ended is another matter: the request may be why.
        """
        if isinstance(outcome, Opened):
            if not outcome.head.startswith(ERROR_EVENT):
                return outcome
            outcome = Failed(
                outcome.worker, FaultDomain.WORKER, "the answer ended before it began", 500
            )
        if ENGINE_DEAD in outcome.message:
            return outcome._replace(fault_domain=FaultDomain.LOST)
        if outcome.worker.part is WorkerRole.DECODE and outcome.status == 500:
            why = f"the {outcome.worker} could not use the prompt's cache; its log says why"
            return Failed(outcome.worker, FaultDomain.TRANSFER, why, 502, TRANSFER_FAILED)
        return outcome

    async def ask_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> Health:
        """At ``/health``, and which model it has."""
        async with session.get(f"{worker.url}/health", allow_redirects=False) as response:
            if response.status != 200:
                raise Unwell(f"it is not well (status {response.status})")
        async with session.get(f"{worker.url}/v1/models", allow_redirects=False) as response:
            models = msgspec.json.decode(await response.read(), type=ModelList).data
        if not models:
            raise Unwell("it serves no model")
        return Health(worker.part, worker.name or worker.url, models[0].id)


def instance_of(prefill: str, room: int) -> str:
    """The instance that computes a room, as the connector calls it at the discovery service."""
    name, num_replicas = replicated(prefill)
    return name if num_replicas == 1 else f"{name}-dp{room % num_replicas}"


def _several(prompt: Any) -> bool:
    """Whether a completion's prompt is a list of prompts: of texts, or of lists of ids."""
    return isinstance(prompt, list) and any(not isinstance(part, int) for part in prompt)


class SglangAdapter(VllmAdapter):
    """SGLang's, with kvferry's backend on both sides (``docs/connectors/sglang.md``).

    Prefill samples the first token and decode takes it from the room. A prefill worker's name is
    its bootstrap address. Several prompts or answers have as many rooms.
    """

    def for_prefill(self, ask: ClientAsk, room: int, deadline_s: float) -> bytes:
        """The same request, to nobody; SGLang computes one token of it."""
        body = {key: value for key, value in ask.body.items() if key not in STREAM_FIELDS}
        return msgspec.json.encode(body | {"bootstrap_room": _rooms(body, room)})

    def for_decode(self, ask: ClientAsk, room: int, prefill: str, deadline_s: float) -> bytes:
        """With where the room's prompt is computed."""
        host, _, port = prefill.rpartition(":")
        rooms = _rooms(ask.body, room)
        where: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": int(port)}
        if isinstance(rooms, list):
            where = {key: [value] * len(rooms) for key, value in where.items()}
        return msgspec.json.encode(ask.body | where | {"bootstrap_room": rooms})

    def whole(self, ask: ClientAsk) -> bytes:
        """A decode server computes no prompts, and says so."""
        return msgspec.json.encode(ask.body)

    def splits(self, ask: ClientAsk) -> bool:
        """Always."""
        return True


def _rooms(body: dict[str, Any], room: int) -> int | list[int]:
    """One for each answer; SGLang wants a list where there are several."""
    prompts = body["prompt"] if _several(body.get("prompt")) else [None]
    num_answers = len(prompts) * (body.get("n") or 1)
    if num_answers == 1 and not _several(body.get("prompt")):
        return room
    first = min(room, (1 << ID_BITS) - num_answers)
    return list(range(first, first + num_answers))


_ADAPTERS: dict[EngineName, type[EngineAdapter]] = {
    EngineName.KVFERRY: KvferryAdapter,
    EngineName.VLLM: VllmAdapter,
    EngineName.SGLANG: SglangAdapter,
}


def adapter_of(engine: EngineName) -> EngineAdapter:
    """By what the workers run."""
    return _ADAPTERS[engine]()
