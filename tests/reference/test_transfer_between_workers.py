"""One worker computes the prompt, another the answer, and kvferry carries the cache.

Ranks are processes, endpoints and transports are real, requests come over HTTP.
The answer must be, token by token, what one engine by itself says afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from urllib.request import urlopen

import pytest
from endpoint.fleets import eventually
from prometheus_client.parser import text_string_to_metric_families
from reference.driving import PROMPTS
from reference.working import (
    PATIENCE_S,
    Alone,
    Caller,
    Neighbour,
    Reply,
    Worker,
    all_at_once,
    call,
    carried,
    hosted,
    options_for,
)

from kvferry import EndpointConfig, Layers, ProofMode
from kvferry.discovery.http.server import DiscoveryServer
from kvferry.layout.layout import Order, Parallel
from kvferry.reference.engine.requests import StepPlan
from kvferry.reference.models.tiny import TinyKind, make_tiny
from kvferry.reference.transfer.extensions import PrefillExtension
from kvferry.transports.base import TransportSetup
from kvferry.transports.shm import ShmTransport
from kvferry.transports.transport_set import TransportSet

Models = dict[TinyKind, Path]

# Sixteen: those of other tests, and more of other lengths.
MANY = (
    *PROMPTS,
    *(tuple((7 * i + j * j) % 256 for j in range(20 + 5 * i)) for i in range(13)),
)
AGAIN = 4
# 6 layers of 3 KV heads of 16 floats, K and V.
TOKEN_BYTES = 6 * 3 * 16 * 4 * 2
# Taken once from another implementation of the default model.
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
ONE, TP3 = Parallel(), Parallel(tp=3)


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with DiscoveryServer() as server:
        yield server.url


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    return Alone(models)


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.close()


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads and nine query heads, so that nine ranks can share the work."""
    folder = tmp_path_factory.mktemp("nine")
    return make_tiny(folder, seed=7, num_attention_heads=9, num_hidden_layers=2)


@contextmanager
def pair_of(
    folder: Path,
    discovery: str,
    neighbour: Neighbour,
    parallels: Sequence[Parallel],
    transport: str = "shm",
    layers: Layers = "auto",
) -> Iterator[list[Worker]]:
    """Prefill in this process, decode in another, each with the ranks that it needs."""
    here, there = parallels
    paged = {"page": 32, "order": Order.HND}
    prefill = options_for("prefill", folder, discovery, here, transport=transport, layers=layers)
    decode = options_for("decode", folder, discovery, there, transport=transport, engine=paged)
    with hosted(prefill) as running, neighbour.runs(decode) as other:
        yield [*running, other]


async def twice(
    caller: Caller, pair: list[Worker], prompts: Sequence[tuple[int, ...]]
) -> list[list[Reply]]:
    """All at once, and some again: the second time decode has the beginning of most prompts."""
    before = await carried(caller, pair[0])
    replies = [
        await all_at_once(caller, pair, prompts),
        await all_at_once(caller, pair, prompts[:AGAIN], room=len(prompts)),
    ]
    told = sum(reply.told["bytes"] for both in replies for reply in both)
    assert await carried(caller, pair[0]) - before == told
    return replies


PAIRS = {
    "TP3 to 1": (TinyKind.LLAMA, TP3, ONE),
    "TP1 to 3": (TinyKind.LLAMA, ONE, TP3),
    "TP6 to 3": (TinyKind.LLAMA, Parallel(tp=6), TP3),
    "Qwen3 TP2 to 1": (TinyKind.QWEN3, Parallel(tp=2), ONE),
}


# Layer by layer, by groups that do not divide the model, or by whole chunks.
LAYERS: dict[str, Layers] = {"shm": 1, "nixl": 4, "mooncake": "all"}


@pytest.mark.parametrize(
    ("name", "transport"),
    [*product(PAIRS, ("shm", "nixl")), ("TP3 to 1", "mooncake")],
)
def test_the_answer_is_what_one_engine_says(
    models: Models,
    discovery: str,
    alone: Alone,
    neighbour: Neighbour,
    name: str,
    transport: str,
) -> None:
    """Sixteen at once, from pages of 16 to pages of 32, without and with a prefix at decode."""
    kind, *parallels = PAIRS[name]
    layers = LAYERS[transport]
    with pair_of(models[kind], discovery, neighbour, parallels, transport, layers) as pair:
        first, second = call(partial(twice, pair=pair, prompts=MANY))
    right = alone(kind, MANY)
    assert [reply.tokens for reply in first] == right
    assert [reply.tokens for reply in second] == right[:AGAIN]
    whole = [len(prompt) // 32 * 32 for prompt in MANY[:AGAIN]]
    assert [reply.told["prefix"] for reply in first] == [0] * len(MANY)
    assert [reply.told["prefix"] for reply in second] == whole
    assert any(whole)


@pytest.mark.parametrize("transport", ["shm", "nixl"])
@pytest.mark.parametrize("sizes", [(3, 9), (9, 3)], ids=str)
def test_nine_ranks_hold_three_heads(
    nine_heads: Path,
    discovery: str,
    neighbour: Neighbour,
    sizes: tuple[int, int],
    transport: str,
) -> None:
    """Each head is on three ranks of the one side, and on one of the other."""
    parallels = Parallel(tp=sizes[0]), Parallel(tp=sizes[1])
    with pair_of(nine_heads, discovery, neighbour, parallels, transport) as pair:
        replies = call(partial(twice, pair=pair, prompts=PROMPTS))
    right = Alone({TinyKind.LLAMA: nine_heads})(TinyKind.LLAMA, PROMPTS)
    assert [[reply.tokens for reply in both] for both in replies] == [right, right]


def test_health_counts_the_bytes_of_all_ranks_and_metrics_those_of_rank_0(
    models: Models, discovery: str, neighbour: Neighbour
) -> None:
    with pair_of(models[TinyKind.LLAMA], discovery, neighbour, (TP3, ONE)) as pair:
        call(partial(all_at_once, pair=pair, prompts=PROMPTS))
        total = call(partial(carried, worker=pair[0]))
        with urlopen(f"{pair[0].url}/metrics", timeout=PATIENCE_S) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    label = pair[0].name
    own = [
        sample.value
        for sample in samples
        if sample.name == "kvferry_bytes_total" and sample.labels["endpoint"] == f"{label}/0"
    ]
    assert 0 < sum(own) < total


def test_only_what_is_new_is_sent(
    models: Models, discovery: str, alone: Alone, neighbour: Neighbour
) -> None:
    long, aligned = PROMPTS[2], PROMPTS[2][:96]
    longer = (*aligned, *PROMPTS[1])

    async def talk(caller: Caller, pair: list[Worker]) -> list[tuple[int, int, int, list[int]]]:
        seen = []
        for room, prompt in enumerate((aligned, aligned, longer, longer, long)):
            before = await carried(caller, pair[0])
            (reply,) = await all_at_once(caller, pair, [prompt], room)
            size = await carried(caller, pair[0]) - before
            assert size == reply.told["bytes"]
            cached = reply.document["usage"]["prompt_tokens_details"]["cached_tokens"]
            seen.append((cached, reply.told["prefix"], size // TOKEN_BYTES, reply.tokens))
        return seen

    with pair_of(models[TinyKind.LLAMA], discovery, neighbour, (TP3, ONE)) as pair:
        seen = call(partial(talk, pair=pair))
        told = call(lambda caller: caller.health(pair[0].url))
    # One head a rank here, heads before tokens there: a page is one piece on both sides.
    assert {mode for mode, size in told["carried_bytes"].items() if size} == {"runs"}
    # Decode's pages have 32 tokens. What fills them is there the next time. Prefill's pages have
    # 16, and it computes at least the last token.
    assert [(cached, prefix, sent) for cached, prefix, sent, _ in seen] == [
        (0, 0, 96),
        (80, 96, 0),
        (96, 96, 32),
        (112, 128, 0),
        (96, 96, 54),
    ]
    answers = alone(TinyKind.LLAMA, [aligned, longer, long])
    assert [tokens for *_, tokens in seen] == [
        *(answers[0], answers[0]),
        *(answers[1], answers[1]),
        answers[2],
    ]


def test_a_real_model_says_the_same(smollm: Path, discovery: str) -> None:
    """Three KV heads on three ranks, to one."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    engine = {"cache_tokens": 1024, "max_requests": 4}

    async def talk(caller: Caller, pair: list[Worker]) -> Reply:
        prefill, _ = pair
        asked = body | {"kvferry": {"room": "smollm", "prefill": prefill.name, "deadline_s": 60}}
        first, second = await asyncio.gather(
            *(caller.post(worker.url, asked, "chat/completions") for worker in pair)
        )
        assert first.status == 200, first
        return second

    options = [
        options_for(role, smollm, discovery, parallel, engine=engine)
        for role, parallel in (("prefill", TP3), ("decode", ONE))
    ]
    with hosted(*options) as pair:
        reply = call(partial(talk, pair=pair))
    assert reply.told["source"] == "transferred"
    assert reply.tokens == PARIS
    answer = reply.document["choices"][0]["message"]["content"]
    assert answer == "The capital of France is Paris."


# ---------------------------------------------------------------- the negative control

# A proof of content would refuse what these tests let through.
UNPROVEN = EndpointConfig(proof=ProofMode.OFF)


class Careless(PrefillExtension):
    """An endpoint whose transport says that it has copied and has not."""

    def make_transports(self) -> TransportSet:
        copies_nothing = TransportSetup(agent="careless", copy=lambda pieces, here, there: None)
        return TransportSet.of(ShmTransport(copies_nothing))


def test_without_the_copy_the_answer_is_wrong(models: Models, discovery: str, alone: Alone) -> None:
    """The comparison above can fail."""
    folder = models[TinyKind.LLAMA]
    source = options_for("prefill", folder, discovery, ONE, name="careless")
    target = options_for("decode", folder, discovery, ONE, endpoint=UNPROVEN)
    with (
        hosted(source, extend=partial(Careless, source)) as (prefill,),
        hosted(target) as (decode,),
    ):
        (reply,) = call(lambda caller: all_at_once(caller, [prefill, decode], PROMPTS[2:]))
    (right,) = alone(TinyKind.LLAMA, PROMPTS[2:])
    assert reply.tokens[0] == right[0]
    assert reply.tokens != right


class Early(PrefillExtension):
    """Pushes each layer when the one below it is computed, and sees it written."""

    def before(self, plan: StepPlan) -> None:
        super().before(plan)
        if plan.works:
            self._push_early(plan, self.tuner.first)

    def computed(self, plan: StepPlan, layer: int) -> None:
        if layer + 1 < self.tuner.end:
            self._push_early(plan, layer + 1)

    def _push_early(self, plan: StepPlan, layer: int) -> None:
        rooms = [self.rooms[work.request].handle for work in plan.works]
        before = [room.num_writes for room in rooms]
        super().computed(plan, layer)
        eventually(lambda: all(r.num_writes > n for r, n in zip(rooms, before, strict=True)))


@pytest.mark.parametrize("kind", [PrefillExtension, Early])
def test_a_layer_that_is_pushed_too_early_makes_the_answer_wrong(
    models: Models, discovery: str, alone: Alone, kind: type[PrefillExtension]
) -> None:
    """The negative control of pushing by layers, and the same with the right extension."""
    folder, name = models[TinyKind.LLAMA], kind.__name__.lower()
    source = options_for("prefill", folder, discovery, ONE, name=name, layers=1)
    target = options_for("decode", folder, discovery, ONE, endpoint=UNPROVEN)
    with (
        hosted(source, extend=partial(kind, source)) as (prefill,),
        hosted(target) as (decode,),
    ):
        (reply,) = call(lambda caller: all_at_once(caller, [prefill, decode], PROMPTS[2:]))
    (right,) = alone(TinyKind.LLAMA, PROMPTS[2:])
    assert reply.tokens[0] == right[0]
    assert (reply.tokens == right) == (kind is PrefillExtension)
