"""Engine adapters: requests to the workers of each engine, and the meaning of their responses.

Both workers of a pair get their request at the same time, with one room. All methods but
``check_health`` are pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import aiohttp
import msgspec

from kvferry.http.sse import EventReader
from kvferry.router.bodies import ID_BITS, OWN_FIELD, REPORT, STREAM_FIELDS, ApiCall
from kvferry.router.first_token import Continuation, may_continue
from kvferry.router.options import EngineName, replicated
from kvferry.router.streams import DONE
from kvferry.router.upstream import (
    TRANSFER_FAILED,
    WORKER_DRAINING,
    AttemptOutcome,
    FailedAttempt,
    FaultDomain,
    OpenResponse,
)
from kvferry.router.worker_pool import Worker, WorkerHealth, WorkerRole, WorkerUnhealthy

PARAMS = "kv_transfer_params"
# Names the data-parallel replica to vLLM's API server.
REPLICA_HEADER = "X-data-parallel-rank"
# An event of vLLM's response to a request that its engine failed.
ERROR_EVENT = b'data: {"error"'
# In vLLM's responses after its engine process has ended.
ENGINE_DEAD = "EngineCore encountered an issue"
# While vLLM shuts down, its engine aborts new requests, and its tokenizer's threads are gone. A
# stream of an aborted request may have no choice that ends.
ABORTED = "abort"
NO_TOKENIZER = "cannot schedule new futures after shutdown"
# Fields that ask for more than one token.
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", *STREAM_FIELDS)


class EngineAdapter(ABC):
    """Adapter of one engine.

    ``needs_seed``: both workers sample, so they need one seed. ``can_pull``: a prefill worker can
    pull the prompt's prefix from the instance ``holder``. ``drains``: a worker has ``/drain``.
    """

    needs_seed = False
    can_pull = False
    drains = False

    @abstractmethod
    def for_prefill(self, call: ApiCall, room: int, deadline_s: float, holder: str = "") -> bytes:
        """Return the body for the prefill worker."""

    @abstractmethod
    def for_decode(self, call: ApiCall, room: int, prefill: str, deadline_s: float) -> bytes:
        """Return the body for the decode worker."""

    @abstractmethod
    def whole(self, call: ApiCall) -> bytes:
        """Return the body for a decode worker that computes the prompt itself."""

    @abstractmethod
    async def check_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> WorkerHealth:
        """Return a worker's health; raise ``WorkerUnhealthy`` if it reports a problem."""

    def headers(self, prefill: str, room: int) -> dict[str, str]:
        """Return additional headers for the prefill worker."""
        return {}

    def can_split(self, call: ApiCall) -> bool:
        """Return whether two workers can share a request."""
        return True

    def may_continue(self, call: ApiCall) -> bool:
        """Return whether a stream may begin with prefill's token; see ``first_token``."""
        return False

    def for_first_token(
        self, call: ApiCall, room: int, deadline_s: float, holder: str = ""
    ) -> bytes:
        """Return the body for a prefill worker whose token begins the stream."""
        return self.for_prefill(call, room, deadline_s, holder)

    def for_rest(self, rest: Continuation, room: int, prefill: str, deadline_s: float) -> bytes:
        """Return the body for the decode worker that continues the stream."""
        return self.for_decode(rest.call, room, prefill, deadline_s)

    def can_move(self, call: ApiCall) -> bool:
        """Return whether another worker can go on with the call's answer; see ``moving``."""
        return False

    def for_move(self, rest: ApiCall, holder: str) -> bytes:
        """Return the body for a decode worker that pulls what the instance ``holder`` computed."""
        return self.whole(rest)

    def num_events(self, call: ApiCall) -> int:
        """Return how many events of a stream show that its worker computes the answer."""
        return 1

    def rejects(self, outcome: AttemptOutcome) -> bool:
        """Return whether the worker accepts no requests any more, as its response shows."""
        return False

    def classify(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Return the outcome of an attempt with two workers, with its fault domain."""
        return outcome


class KvferryAdapter(EngineAdapter):
    """Adapter of the reference engine (``docs/serving.md``)."""

    needs_seed = True
    can_pull = True
    drains = True

    def for_prefill(self, call: ApiCall, room: int, deadline_s: float, holder: str = "") -> bytes:
        """Leave out the stream, and add the room and the holder."""
        body = {key: value for key, value in call.body.items() if key not in STREAM_FIELDS}
        own = {"room": room, "deadline_s": deadline_s} | _held_by(holder)
        return msgspec.json.encode(body | {OWN_FIELD: own})

    def for_decode(self, call: ApiCall, room: int, prefill: str, deadline_s: float) -> bytes:
        """Add the room and the prefill worker's name."""
        own = {"room": room, "prefill": prefill, "deadline_s": deadline_s}
        return self._answer(call, {OWN_FIELD: own})

    def whole(self, call: ApiCall) -> bytes:
        """Return the client's body."""
        return self._answer(call, {})

    def can_move(self, call: ApiCall) -> bool:
        """Accept every stream: the worker supports no request whose rest would differ."""
        return call.stream

    def for_move(self, rest: ApiCall, holder: str) -> bytes:
        """Add the holder's name."""
        return self._answer(rest, {OWN_FIELD: _held_by(holder)})

    def _answer(self, call: ApiCall, more: dict[str, Any]) -> bytes:
        """Return a decode worker's body, which asks for the token ids of a stream."""
        ids = {REPORT: True} if call.stream else {}
        return msgspec.json.encode(call.body | ids | more)

    def rejects(self, outcome: AttemptOutcome) -> bool:
        """Return whether the worker drains."""
        return isinstance(outcome, FailedAttempt) and outcome.code == WORKER_DRAINING

    async def check_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> WorkerHealth:
        """Query ``/healthz``, which also proves that the worker has the cluster key."""
        url = f"{worker.url}/healthz?nonce={nonce}"
        async with session.get(url, allow_redirects=False) as response:
            health = msgspec.json.decode(await response.read(), type=WorkerHealth)
            if response.status != 200:
                raise WorkerUnhealthy(
                    health.problem or f"its health check returned status {response.status}"
                )
            return health


class EndedChoice(msgspec.Struct, frozen=True):
    """The field of a choice that says why it ended."""

    finish_reason: str | None = None


class AnyAnswer(msgspec.Struct, frozen=True):
    """The choices of a response or of an event."""

    choices: list[EndedChoice] = []


class ModelEntry(msgspec.Struct, frozen=True):
    """An entry of vLLM's model list; LoRA adapters come after their base model."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """Fields of vLLM's ``/v1/models`` that the router reads."""

    data: list[ModelEntry]


class VllmAdapter(EngineAdapter):
    """Adapter of vLLM with kvferry's connector (``docs/connectors/vllm.md``).

    Decode computes the prompt's last token again and samples, so both workers need no common
    seed. Among data-parallel prefill replicas behind one URL (``NAME*N``), the room id selects.
    """

    can_pull = True

    def for_prefill(self, call: ApiCall, room: int, deadline_s: float, holder: str = "") -> bytes:
        """Ask for one token."""
        return msgspec.json.encode(_one_token(call, room, holder))

    def for_decode(self, call: ApiCall, room: int, prefill: str, deadline_s: float) -> bytes:
        """Add the room and the instance that computes the prompt."""
        return msgspec.json.encode(call.body | {PARAMS: _from_room(prefill, room)})

    def may_continue(self, call: ApiCall) -> bool:
        """Accept a stream whose rest does not depend on where it begins."""
        return self.can_split(call) and may_continue(call)

    def for_first_token(
        self, call: ApiCall, room: int, deadline_s: float, holder: str = ""
    ) -> bytes:
        """Ask for one token, with the token ids of the prompt and of the token."""
        return msgspec.json.encode(_one_token(call, room, holder) | {"return_token_ids": True})

    def for_rest(self, rest: Continuation, room: int, prefill: str, deadline_s: float) -> bytes:
        """Add the room, which has all tokens of the prompt but the last."""
        params = _from_room(prefill, room, tokens=rest.num_prompt_tokens)
        return msgspec.json.encode(rest.call.body | {PARAMS: params})

    def headers(self, prefill: str, room: int) -> dict[str, str]:
        """Name the data-parallel replica, if there are several."""
        _, num_replicas = replicated(prefill)
        return {} if num_replicas == 1 else {REPLICA_HEADER: str(room % num_replicas)}

    def whole(self, call: ApiCall) -> bytes:
        """Leave out a client's own transfer parameters."""
        return msgspec.json.encode({k: v for k, v in call.body.items() if k != PARAMS})

    def can_split(self, call: ApiCall) -> bool:
        """Accept one prompt and one choice: vLLM makes several requests of more, with one room."""
        return call.body.get("n") in (None, 1) and not _is_batch(call.body.get("prompt"))

    def num_events(self, call: ApiCall) -> int:
        """A chat's first event names a role, even if the engine rejects or fails the request."""
        return 2 if "messages" in call.body else 1

    def rejects(self, outcome: AttemptOutcome) -> bool:
        """Return whether vLLM shuts down. Its health checks do not show that."""
        if isinstance(outcome, FailedAttempt):
            return NO_TOKENIZER in outcome.message
        if outcome.head.startswith(b"data:"):
            return _is_aborted_stream(outcome.head)
        return ABORTED.encode() in outcome.head and ABORTED in _finish_reasons(outcome.head)

    def classify(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Take status 500 of a decode worker as a failed transfer: vLLM gives no details.

        If the whole engine ended, the request may have caused it.
        """
        if isinstance(outcome, OpenResponse):
            if ERROR_EVENT not in outcome.head:
                return outcome
            outcome = FailedAttempt(
                outcome.worker, FaultDomain.WORKER, "the response ended before it began", 500
            )
        if ENGINE_DEAD in outcome.message:
            return outcome._replace(fault_domain=FaultDomain.LOST)
        if outcome.worker.role is WorkerRole.DECODE and outcome.status == 500:
            reason = f"the {outcome.worker} could not load the prompt's cache; see its log"
            return FailedAttempt(outcome.worker, FaultDomain.TRANSFER, reason, 502, TRANSFER_FAILED)
        return outcome

    async def check_health(
        self, session: aiohttp.ClientSession, worker: Worker, nonce: str
    ) -> WorkerHealth:
        """Query ``/health`` and the served model."""
        async with session.get(f"{worker.url}/health", allow_redirects=False) as response:
            if response.status != 200:
                raise WorkerUnhealthy(f"its health check returned status {response.status}")
        async with session.get(f"{worker.url}/v1/models", allow_redirects=False) as response:
            models = msgspec.json.decode(await response.read(), type=ModelList).data
        if not models:
            raise WorkerUnhealthy("the worker serves no model")
        return WorkerHealth(worker.role, worker.name or worker.url, models[0].id)


def _is_aborted_stream(head: bytes) -> bool:
    """Return whether a stream is aborted at its beginning, or over before any choice has ended."""
    found = [event.data for event in EventReader(len(head) + 1).feed(head) if event.data]
    reasons: set[str] = set().union(*map(_finish_reasons, found))
    # Usage comes after all choices.
    is_over = any(document == DONE or '"choices":[]' in document for document in found)
    return ABORTED in reasons or (is_over and not reasons)


def _finish_reasons(document: str | bytes) -> set[str]:
    """Return why choices of a response or of an event have ended."""
    try:
        answer = msgspec.json.decode(document, type=AnyAnswer)
    except ValueError:
        return set()
    return {choice.finish_reason for choice in answer.choices if choice.finish_reason}


def _held_by(holder: str) -> dict[str, str]:
    return {"holder": holder} if holder else {}


def _one_token(call: ApiCall, room: int, holder: str = "") -> dict[str, Any]:
    body = {key: value for key, value in call.body.items() if key not in LIMITS}
    limit = "max_completion_tokens" if "messages" in body else "max_tokens"
    own = {"room": room} | _held_by(holder)
    return body | {limit: 1, PARAMS: {"do_remote_decode": True, OWN_FIELD: own}}


def _from_room(prefill: str, room: int, **more: int) -> dict[str, Any]:
    own = {"room": room, "prefill": instance_of(prefill, room)} | more
    return {"do_remote_prefill": True, OWN_FIELD: own}


def instance_of(prefill: str, room: int) -> str:
    """Return the name at the discovery service of the instance that computes a room."""
    name, num_replicas = replicated(prefill)
    return name if num_replicas == 1 else f"{name}-dp{room % num_replicas}"


def _is_batch(prompt: Any) -> bool:
    """Return whether a completion's prompt is a list of strings or of token lists."""
    return isinstance(prompt, list) and any(not isinstance(part, int) for part in prompt)


class SglangAdapter(VllmAdapter):
    """Adapter of SGLang with kvferry's backend (``docs/connectors/sglang.md``).

    Prefill samples the first token and sends it in the room, so decode streams it. A prefill
    worker's name is its bootstrap address. Each prompt and each choice has a room of its own.
    """

    can_pull = False

    def for_prefill(self, call: ApiCall, room: int, deadline_s: float, holder: str = "") -> bytes:
        """Leave out the stream; SGLang computes one token."""
        body = {key: value for key, value in call.body.items() if key not in STREAM_FIELDS}
        return msgspec.json.encode(body | {"bootstrap_room": _rooms(body, room)})

    def for_decode(self, call: ApiCall, room: int, prefill: str, deadline_s: float) -> bytes:
        """Add the room and the prefill worker's bootstrap address."""
        host, _, port = prefill.rpartition(":")
        rooms = _rooms(call.body, room)
        where: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": int(port)}
        if isinstance(rooms, list):
            where = {key: [value] * len(rooms) for key, value in where.items()}
        return msgspec.json.encode(call.body | where | {"bootstrap_room": rooms})

    def whole(self, call: ApiCall) -> bytes:
        """Return the client's body; SGLang's decode server rejects it."""
        return msgspec.json.encode(call.body)

    def can_split(self, call: ApiCall) -> bool:
        """Accept every request."""
        return True

    def rejects(self, outcome: AttemptOutcome) -> bool:
        """Return False: SGLang's health checks fail while it shuts down."""
        return False

    def may_continue(self, call: ApiCall) -> bool:
        """Leave the whole stream to decode."""
        return False


def _rooms(body: dict[str, Any], room: int) -> int | list[int]:
    """Return the room id, or a list with one per choice of each prompt."""
    prompts = body["prompt"] if _is_batch(body.get("prompt")) else [None]
    num_choices = len(prompts) * (body.get("n") or 1)
    if num_choices == 1 and not _is_batch(body.get("prompt")):
        return room
    first = min(room, (1 << ID_BITS) - num_choices)
    return list(range(first, first + num_choices))


class VllmToSglangAdapter(SglangAdapter):
    """Adapter of vLLM as prefill and SGLang as decode.

    A prefill worker's name is the address of the discovery service where it is the only instance.
    """

    def for_prefill(self, call: ApiCall, room: int, deadline_s: float, holder: str = "") -> bytes:
        """Ask for one token, which the room carries to SGLang."""
        body = _one_token(call, room)
        body[PARAMS][OWN_FIELD]["first_token"] = True
        return msgspec.json.encode(body)

    def can_split(self, call: ApiCall) -> bool:
        """Accept one prompt and one choice, as vLLM does."""
        return VllmAdapter.can_split(self, call)


class SglangToVllmAdapter(SglangAdapter):
    """Adapter of SGLang as prefill, without data-parallel replicas, and vLLM as decode."""

    def for_decode(self, call: ApiCall, room: int, prefill: str, deadline_s: float) -> bytes:
        """Add the room and the instance that SGLang registers at its bootstrap address."""
        params = _from_room(f"sglang/{prefill}/dp0of1", room)
        return msgspec.json.encode(call.body | {PARAMS: params})

    def whole(self, call: ApiCall) -> bytes:
        """Leave out a client's own transfer parameters."""
        return VllmAdapter.whole(self, call)

    def can_split(self, call: ApiCall) -> bool:
        """Accept one prompt and one choice, as vLLM does."""
        return VllmAdapter.can_split(self, call)


_ADAPTERS: dict[EngineName, type[EngineAdapter]] = {
    EngineName.KVFERRY: KvferryAdapter,
    EngineName.VLLM: VllmAdapter,
    EngineName.SGLANG: SglangAdapter,
}


_PAIRS: dict[tuple[EngineName, EngineName], type[EngineAdapter]] = {
    (EngineName.VLLM, EngineName.SGLANG): VllmToSglangAdapter,
    (EngineName.SGLANG, EngineName.VLLM): SglangToVllmAdapter,
}


def adapter_of(engine: EngineName, decode: EngineName | None = None) -> EngineAdapter:
    """Return the adapter of an engine, or of a pair if ``decode`` is another engine."""
    if decode is None or decode is engine:
        return _ADAPTERS[engine]()
    return _PAIRS[engine, decode]()
