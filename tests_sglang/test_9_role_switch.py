"""Servers that change from prefill to decode and back (``--enable-pd-role-switch``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import CHUNK, running
from pairs import NUM_TOKENS, generate, generate_all
from prompts import LONG, MANY, SHORT
from reference import Reference
from servers import SWITCHABLE, Server, Side, post, stop_all
from test_4_aborts_and_deaths import is_idle, wait_until

from kvferry import DiscoveryClient

NUM_SWITCHES = 4
LIST_S = 10.0


class SwitchablePair(NamedTuple):
    """Two servers that begin as prefill and as decode."""

    wide: Server
    narrow: Server


@pytest.fixture(scope="module")
def pair(model: Path, folder: Path, reference: Reference) -> Iterator[SwitchablePair]:
    stop_all()
    flags = (*CHUNK, SWITCHABLE)
    sides = (
        Side(role="prefill", tp=2, page=16, flags=flags),
        Side(role="decode", page=1, flags=flags),
    )
    for started in running(sides, model, folder):
        yield SwitchablePair(*started)


def switch(server: Server, role: str) -> None:
    """Change an idle server's role."""
    wait_until(lambda: is_idle(server), f"{server.side} is not idle")
    # SGLang wants to know the memory of CUDA graphs, which a CPU does not have.
    body = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}
    answer = post(f"{server.url}/pd_role_switch", body)
    assert answer.get("success"), answer


def incarnations(server: Server) -> list[tuple[str, int | None]]:
    """Return the registered ranks at a server's bootstrap port, as instance and incarnation."""
    with DiscoveryClient(f"http://127.0.0.1:{server.bootstrap}") as client:
        listed = client.instances().result(LIST_S).instances
        return [
            (summary.name, view.incarnation)
            for summary in listed
            if summary.complete
            for view in client.resolve(summary.name, LIST_S).ranks
        ]


def num_closed(server: Server) -> int:
    """Return how many endpoints have ended with all memory free."""
    return server.log_text().count("free=True")


def test_a_pair_swaps_its_roles_and_keeps_answering(
    pair: SwitchablePair, reference: Reference
) -> None:
    prefill, decode = pair
    prompts = [reference.ids(text) for text in (SHORT, LONG, *MANY[:4])]
    expected = [reference.answer(prompt, NUM_TOKENS) for prompt in prompts]
    seen: set[tuple[str, int | None]] = set()
    for turn in range(1, NUM_SWITCHES + 1):
        assert [answers.ids for answers in generate_all(prompts, prefill, decode)] == expected
        registered = incarnations(prefill)
        assert len(registered) == prefill.side.tp
        assert not seen.intersection(registered)
        seen.update(registered)
        assert incarnations(decode) == []
        switch(prefill, "decode")
        switch(decode, "prefill")
        assert [num_closed(server) for server in (prefill, decode)] == [
            turn * server.side.tp for server in (prefill, decode)
        ]
        prefill, decode = decode, prefill
    assert [answers.ids for answers in generate_all(prompts, prefill, decode)] == expected


def test_a_decode_server_finds_a_prefill_server_that_returned(
    pair: SwitchablePair, reference: Reference
) -> None:
    """Only the prefill server changes its role, and the decode server keeps its connection."""
    prompt = reference.ids(LONG)
    for _ in range(2):
        answers = generate(prompt, *pair)
        assert answers.ids == reference.answer(prompt, NUM_TOKENS)
        switch(pair.wide, "decode")
        switch(pair.wide, "prefill")
    answers = generate(prompt, *pair)
    assert answers.ids == reference.answer(prompt, NUM_TOKENS)
