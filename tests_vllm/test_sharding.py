"""TP2→1 and TP1→2 between engines that both prefill and decode, with the policy "fail".

One pair uses NIXL, the other shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests_vllm.models import padded
from tests_vllm.servers import (
    SKIPPED,
    Deployment,
    HttpError,
    Server,
    complete,
    log,
    prefilled_then_decoded,
    timed,
    token_ids,
)

ANSWER = 12
PROMPTS = (
    "The capital of France is",
    "Write one sentence about a ferry that crosses a river at night.",
    "Once upon a time there was a small ferry, and it carried " + "apples and pears, " * 30 + "and",
)


# With "auto" on both sides a link uses shared memory, because they are on one host. If one side has
# NIXL only, it uses NIXL.
CARRIED: dict[str, dict[str, Any]] = {
    "nixl": {"transport": "nixl"},
    "layer by layer": {"layers": 1},
}


class Engines(NamedTuple):
    """An engine on two ranks, and one on one rank."""

    two: Server
    one: Server


@pytest.fixture(scope="module")
def all_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    model: Path = padded(tmp_path_factory.mktemp("padded"))
    with Deployment() as deployment, timed("vLLM TP2 and twice TP1, each both prefill and decode"):
        more = "--no-enable-prefix-caching --max-num-batched-tokens 256"
        two = deployment.connector("kv_both", "two", layers=1)
        servers = {"two": deployment.vllm("two", model, tp=2, transfer=two, more=more)}
        for what, carried in CARRIED.items():
            name = what.replace(" ", "-")
            one = deployment.connector("kv_both", name, **carried) | {
                "kv_connector": "SkippingConnector",
                "kv_connector_module_path": "tests_vllm.skipping",
            }
            servers[what] = deployment.vllm(name, model, transfer=one, more=more)
        for server in servers.values():
            server.wait_until_up()
        log("all are up")
        yield servers


@pytest.fixture(params=CARRIED)
def engines(request: pytest.FixtureRequest, all_engines: dict[str, Server]) -> Engines:
    return Engines(all_engines["two"], all_engines[request.param])


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "sentence", "chunks"])
@pytest.mark.parametrize("sizes", ["2 to 1", "1 to 2"])
def test_the_answer_is_that_of_one_engine(engines: Engines, sizes: str, prompt: str) -> None:
    prefill, decode = engines if sizes == "2 to 1" else engines[::-1]
    with timed(f"TP{sizes.replace('to', '→')}, {len(prompt)} characters"):
        answer = prefilled_then_decoded(prefill, decode, prompt, ANSWER)
    alone = complete(engines.one, prompt, ANSWER)
    assert token_ids(answer) == token_ids(alone)


def test_skipped_transfer_changes_the_answer(engines: Engines) -> None:
    prompt = PROMPTS[1]
    given = {"do_remote_decode": True, "kvferry": {"room": f"{SKIPPED}{engines.one.name}"}}
    params = complete(engines.two, prompt, 1, kv_transfer_params=given)["kv_transfer_params"]
    answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=params)
    alone = complete(engines.one, prompt, ANSWER)
    assert token_ids(answer) != token_ids(alone)


def test_wrong_prompt_fails_only_its_request(engines: Engines) -> None:
    first = complete(engines.one, "To be or", 1, kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    before = engines.two.log.read_text().count("content-differs")
    with timed("a request for another prompt's room"), pytest.raises(HttpError) as caught:
        complete(engines.two, "To do or", ANSWER, kv_transfer_params=params)
    assert caught.value.status == 500
    assert engines.two.log.read_text().count("content-differs") > before
    answer = prefilled_then_decoded(engines.one, engines.two, PROMPTS[0], ANSWER)
    assert token_ids(answer) == token_ids(complete(engines.one, PROMPTS[0], ANSWER))
