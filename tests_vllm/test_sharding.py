"""TP2 to TP1 and TP1 to TP2: two engines that both prefill and decode, with policy "fail"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests_vllm.models import padded
from tests_vllm.servers import (
    SKIPPED,
    Asked,
    Deployment,
    Server,
    complete,
    prefilled_then_decoded,
    say,
    timed,
    token_ids,
)

ANSWER = 12
PROMPTS = (
    "The capital of France is",
    "Write one sentence about a ferry that crosses a river at night.",
    "Once upon a time there was a small ferry, and it carried " + "apples and pears, " * 30 + "and",
)


# By default each link takes the best transport, which is shared memory on one host.
CARRIED: dict[str, dict[str, Any]] = {
    "nixl": {"transport": "nixl"},
    "layer by layer": {"layers": 1},
}


class Engines(NamedTuple):
    """One engine on two ranks, one on one."""

    two: Server
    one: Server


@pytest.fixture(scope="module", params=CARRIED)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    model: Path = padded(tmp_path_factory.mktemp("padded"))
    carried = CARRIED[request.param]
    what = f"vLLM TP2 and TP1, each both prefill and decode, {request.param}"
    with Deployment() as deployment, timed(what):
        more = "--no-enable-prefix-caching --max-num-batched-tokens 256"
        two = deployment.connector("kv_both", "two", **carried)
        one = deployment.connector("kv_both", "one", **carried)
        one |= {
            "kv_connector": "SkippingConnector",
            "kv_connector_module_path": "tests_vllm.skipping",
        }
        servers = Engines(
            deployment.vllm("two", model, tp=2, transfer=two, more=more),
            deployment.vllm("one", model, transfer=one, more=more),
        )
        for server in servers:
            server.wait_until_up()
        say("both are up")
        yield servers


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "sentence", "chunks"])
@pytest.mark.parametrize("sizes", ["2 to 1", "1 to 2"])
def test_the_answer_is_that_of_one_engine(engines: Engines, sizes: str, prompt: str) -> None:
    prefill, decode = engines if sizes == "2 to 1" else engines[::-1]
    with timed(f"TP{sizes.replace('to', '→')}, {len(prompt)} characters"):
        answer = prefilled_then_decoded(prefill, decode, prompt, ANSWER)
    alone = complete(engines.one, prompt, ANSWER)
    assert token_ids(answer) == token_ids(alone)


def test_a_transfer_that_moves_nothing_would_be_noticed(engines: Engines) -> None:
    prompt = PROMPTS[1]
    given = {"do_remote_decode": True, "kvferry": {"room": f"{SKIPPED}1"}}
    params = complete(engines.two, prompt, 1, kv_transfer_params=given)["kv_transfer_params"]
    answer = complete(engines.one, prompt, ANSWER, kv_transfer_params=params)
    alone = complete(engines.one, prompt, ANSWER)
    assert token_ids(answer) != token_ids(alone)


def test_a_wrong_prompt_fails_its_request_and_no_other(engines: Engines) -> None:
    first = complete(engines.one, "To be or", 1, kv_transfer_params={"do_remote_decode": True})
    params = first["kv_transfer_params"]
    with timed("a request for another prompt's room"), pytest.raises(Asked) as caught:
        complete(engines.two, "To do or", ANSWER, kv_transfer_params=params)
    assert caught.value.status == 500
    assert "content-differs" in engines.two.log.read_text()
    answer = prefilled_then_decoded(engines.one, engines.two, PROMPTS[0], ANSWER)
    assert token_ids(answer) == token_ids(complete(engines.one, PROMPTS[0], ANSWER))
