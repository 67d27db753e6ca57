"""The cases of vLLM: answers of pairs against one server's, failures, and time to first token.

In float32 a pair has to answer as one server without a connector does, whatever the tensor
parallelism. In bfloat16 rounding depends on how a prompt was cut: decode computes the last token
with all others cached, so its answer is compared with that of a server that was asked twice.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from gpu_engines.checklist import Case, CaseFailed, agreement, eventually, expect, expect_equal
from gpu_engines.client import RequestFailed, get, leave_early, metric, post
from gpu_engines.differences import shown_difference
from gpu_engines.model import FIRST_WORD
from gpu_engines.servers import Server, Servers, say
from gpu_engines.vllm_drain import terminated_prefill_fails_no_request
from gpu_engines.vllm_load import load_beside_nixl
from gpu_engines.vllm_servers import (
    COMPLETIONS,
    ROOMS_DONE,
    SKIPPED,
    WIDE,
    VllmAnswer,
    VllmServers,
    alone,
    at_once,
    body,
    in_turn,
    is_idle,
    margin,
    prompt,
    transfers,
)

TOKENS = 24
TIMED_TOKENS = 8
AT_ONCE = 16
# Tokens of a request that is decoded while another's prefill is killed.
KILLED_BESIDE = 400
# Time to notice a dead peer and to free its requests.
FAIL_S = 30.0
WARM_UP_S = 240.0


class VllmRun:
    """Shared state of the cases: servers, the reference's answers and measured figures."""

    def __init__(self, servers: Servers, commands: VllmServers, repeats: int) -> None:
        self.servers = servers
        self.commands = commands
        self.scale = commands.scale
        self.repeats = repeats
        self.figures: list[dict[str, Any]] = []

    def pair(self, prefill: str, decode: str) -> tuple[Server, Server]:
        """Return two servers."""
        return self.servers[prefill], self.servers[decode]

    def expected(self, ids: Sequence[int], num_tokens: int = TOKENS) -> list[int]:
        """Return the answer of the server without a connector, in float32."""
        return alone(self.servers["alone32"], ids, num_tokens).tokens

    def check(
        self, ids: Sequence[int], tokens: Sequence[int], what: str, num_tokens: int = TOKENS
    ) -> None:
        """Compare an answer with the expected one. A failure says how near the tokens are."""
        wanted = self.expected(ids, num_tokens)
        if list(tokens) != wanted:
            agreed = wanted[: agreement(tokens, wanted)]
            apart = margin(self.servers["alone32"], [*ids, *agreed])
            what += f" (its best next tokens are {apart:.4f} apart)"
        expect_equal(tokens, wanted, what)

    def start_router(self, prefills: Sequence[str], decode: str, first_token: str) -> Server:
        """Start kvferry's router over these servers, and wait until it sees all."""
        senders = [self.servers[name] for name in prefills]
        spec = self.commands.router(senders, self.servers[decode], first_token)
        self.servers.start([spec])
        self.servers.wait(30.0)
        router = self.servers[spec.name]
        expect(router.is_up, f"{spec.name}: {router.failure}")
        eventually(
            lambda: all(worker["up"] for worker in get(router, "/healthz")["workers"]),
            f"{spec.name} sees all servers",
        )
        return router

    def check_pair(self, prefill: str, decode: str, lengths: Sequence[int] | None = None) -> str:
        """Compare a pair's answers with one server's, asked in turn and at once."""
        pair = self.pair(prefill, decode)
        done = metric(pair[1], ROOMS_DONE)
        lengths = lengths or self.scale.lengths
        for length in lengths:
            for way in (in_turn, at_once):
                ids = prompt(length, f"{prefill}-{decode}-{way.__name__}")
                answer = way(*pair, ids, TOKENS)
                self.check(ids, answer.tokens, f"{length} tokens, {way.__name__}")
        _until_counted(pair[1], done + 2 * len(lengths))
        return f"{2 * len(lengths)} prompts of {lengths} tokens, {TOKENS} tokens equal"


ROOMS_FAILED = "vllm:kvferry_rooms_failed_total"
BYTES_SENT = "vllm:kvferry_bytes_sent_total"
BEGUN = "kvferry_router_first_tokens_from_prefill_total"
# The way of asking whose first token prefill computes.
EARLY = "router, prefill first"


# ---------------------------------------------------------------- equality


def tp1_to_tp1(run: VllmRun) -> str:
    """Eager servers with different block sizes."""
    return run.check_pair("p32", "d32")


def tp2_to_tp1(run: VllmRun) -> str:
    return run.check_pair("p32x2", "d32")


def tp1_to_tp2(run: VllmRun) -> str:
    return run.check_pair("p32", "d32x2")


def chunked_prefill(run: VllmRun) -> str:
    """A prompt that is longer than a step of prefill may be; the log lists the steps."""
    length, chunk = run.scale.lengths[-1], run.scale.chunk
    expect(chunk < length, f"a step of {chunk} tokens holds the whole prompt")
    for way in (in_turn, at_once):
        steps = _steps_of_prefill(run, way, length)
        expect(max(steps) <= chunk, f"{way.__name__}: prefill took steps of {steps} tokens")
        expect(sum(steps) == length, f"{way.__name__}: {sum(steps)} of {length} were computed")
    return f"{length} tokens in steps of {steps}"


def _steps_of_prefill(run: VllmRun, way: Callable[..., VllmAnswer], length: int) -> list[int]:
    """Return how many tokens of a new prompt each step of prefill computed."""
    ids, (prefill, decode) = prompt(length, f"chunked {way.__name__}"), run.pair("p32", "d32")
    earlier = len(_prefill_steps(prefill))
    answer = way(prefill, decode, ids, TOKENS)
    run.check(ids, answer.tokens, f"{length} tokens, {way.__name__}")
    eventually(
        lambda: sum(_prefill_steps(prefill)[earlier:]) >= length,
        f"{prefill.name} lists {length} tokens",
    )
    return _prefill_steps(prefill)[earlier:]


def _prefill_steps(server: Server) -> list[int]:
    """Return how many tokens of prompts each step of a server computed."""
    lines = server.log_lines("Iteration(", "context tokens")
    found = [int(line.partition(" context tokens")[0].rpartition(" ")[2]) for line in lines]
    return [tokens for tokens in found if tokens]


def prefix_hits_at_decode(run: VllmRun) -> str:
    """The second prompt shares most of the first, so less is transferred."""
    length, (prefill, decode) = run.scale.lengths[-1], run.pair("p32", "d32")
    begin = prompt(length - run.scale.blocks[-1], "shared")
    sent = []
    for end in ("first", "second"):
        ids = begin + prompt(run.scale.blocks[-1], end)
        done, before = metric(prefill, ROOMS_DONE), metric(prefill, BYTES_SENT)
        answer = in_turn(prefill, decode, ids, TOKENS)
        _until_counted(prefill, done + 1)
        sent.append(metric(prefill, BYTES_SENT) - before)
        run.check(ids, answer.tokens, f"{end} prompt")
    expect(0 < sent[1] < sent[0] / 2, f"{sent[0]:.0f} bytes were sent, and then {sent[1]:.0f}")
    return f"{sent[0] / 1e6:.1f} MB, then {sent[1] / 1e6:.1f} MB"


def _until_counted(server: Server, num_rooms: float) -> None:
    """Wait until a server counts this many transferred rooms since its start."""
    eventually(
        lambda: metric(server, ROOMS_DONE) >= num_rooms,
        f"{server.name} counts all rooms as transferred",
    )


def _until_idle(server: Server) -> float:
    return eventually(lambda: is_idle(server), f"{server.name} frees its blocks", FAIL_S)


def sixteen_at_once_through_the_router(run: VllmRun) -> str:
    """kvferry's router, which asks both sides at the same time."""
    router, decode = run.start_router(["p32"], "d32", "decode"), run.servers["d32"]
    longest = run.scale.lengths[-2]
    prompts = [prompt(1 + longest * i // AT_ONCE, "at once") for i in range(1, AT_ONCE + 1)]
    done, failed = metric(decode, ROOMS_DONE), metric(decode, ROOMS_FAILED)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda ids: post(router, COMPLETIONS, body(ids, TOKENS)), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        run.check(ids, tokens, f"{len(ids)} tokens")
    _until_counted(decode, done + AT_ONCE)
    expect(metric(decode, ROOMS_FAILED) == failed, "rooms failed")
    return f"{AT_ONCE} prompts of up to {longest} tokens at once, all equal"


def captured_graphs_in_bfloat16(run: VllmRun) -> str:
    """Decode runs captured graphs, and so does the server that is asked twice."""
    pair, one = run.pair("p16", "d16"), run.servers["alone16"]
    for length in run.scale.timed_lengths:
        for way in (in_turn, at_once):
            ids = prompt(length, f"graphs-{way.__name__}")
            alone(one, ids, 1)
            wanted = alone(one, ids, TOKENS).tokens
            expect_equal(way(*pair, ids, TOKENS).tokens, wanted, f"{length}, {way.__name__}")
    if run.commands.is_cuda:
        for server in (*pair, one):
            expect(bool(server.log_lines("Graph capturing")), f"{server.name} captured no graphs")
    return f"prompts of {run.scale.timed_lengths} tokens, {TOKENS} tokens equal"


def skipped_transfer_changes_the_answer(run: VllmRun) -> str:
    """Negative control: decode reports rooms as received that were not transferred."""
    agree = []
    for length in run.scale.lengths:
        ids, room = prompt(length, "skipped"), f"{SKIPPED}{secrets.token_hex(4)}"
        answer = in_turn(*run.pair("p32", "skipping"), ids, TOKENS, room)
        agree.append(agreement(answer.tokens, run.expected(ids)))
    expect(max(agree) < TOKENS, f"the answers are right without the cache: {agree} of {TOKENS}")
    ids = prompt(run.scale.lengths[0], "carried")
    answer = in_turn(*run.pair("p32", "skipping"), ids, TOKENS)
    run.check(ids, answer.tokens, "the same decode with the transfer")
    return f"{agree} of {TOKENS} tokens agree without the transfer"


def links_take_cuda(run: VllmRun) -> str:
    """``auto`` selected CUDA IPC on every link."""
    found = {}
    for name in ("p32", "p32x2", "p16"):
        lines = run.servers[name].log_lines("connected endpoint=", "transport=")
        words = [word for line in lines for word in line.split() if word.startswith("transport=")]
        found[name] = sorted({word.removeprefix("transport=") for word in words})
    expect(set(map(tuple, found.values())) == {("cuda",)}, f"transports by prefill: {found}")
    return "all links of p32, p32x2 and p16"


# ---------------------------------------------------------------- beside another connector


def offloading_beside_kvferry(run: VllmRun) -> str:
    """MultiConnector with OffloadingConnector on both sides: cold, stored, and loaded prompts."""
    return _check_offloading(run, "multi-p", "multi-d")


def simple_offloading_beside_kvferry(run: VllmRun) -> str:
    """The same with SimpleCPUOffloadConnector."""
    return _check_offloading(run, "simple-p", "simple-d")


def _check_offloading(run: VllmRun, *names: str) -> str:
    prefill, decode = run.pair(*names)
    loaded = "vllm:external_prefix_cache_hits_total"
    for length in run.scale.lengths[1:]:
        ids = prompt(length, "offloaded")
        for state in ("cold", "in the GPU's cache", "in the host's cache"):
            if state == "in the host's cache":
                _empty_cache(prefill)
                _empty_cache(decode)
            before = metric(prefill, loaded)
            answer = in_turn(prefill, decode, ids, TOKENS)
            run.check(ids, answer.tokens, f"{length} tokens, {state}")
            if state == "in the host's cache":
                expect(metric(prefill, loaded) > before, f"{length} tokens were not loaded")
    _until_idle(prefill)
    _until_idle(decode)
    return f"prompts of {run.scale.lengths[1:]} tokens, cold, cached and loaded"


def _empty_cache(server: Server) -> None:
    """Forget the cached blocks on the GPU. vLLM refuses while any is in use."""
    eventually(
        lambda: post(server, "/reset_prefix_cache", {}).get("success") is True,
        f"{server.name} empties its cache",
    )


# ---------------------------------------------------------------- failures


def abort_frees_both_sides(run: VllmRun) -> str:
    """A client leaves while prefill computes; both sides release everything."""
    prefill, decode = run.pair("p32", "d32")
    ids = prompt(run.scale.lengths[-1], "left")
    own = {"room": secrets.token_hex(8)}
    second = {"do_remote_prefill": True, "kvferry": own | {"prefill": prefill.name}}
    first = {"do_remote_decode": True, "kvferry": own}
    left = [
        leave_early(decode, COMPLETIONS, body(ids, 500, stream=True, kv_transfer_params=second)),
        leave_early(prefill, COMPLETIONS, body(ids, 1, kv_transfer_params=first)),
    ]
    eventually(lambda: not is_idle(decode), "decode has the request")
    for connection in left:
        connection.close()
    took_s = _until_idle(prefill) + _until_idle(decode)
    ids = prompt(run.scale.lengths[-2], "after an abort")
    run.check(ids, in_turn(prefill, decode, ids, TOKENS).tokens, "a later prompt")
    return f"idle again after {took_s:.1f} s"


def killed_prefill_fails_only_its_request(run: VllmRun) -> str:
    """Both ranks of a prefill are killed while they compute.

    With the policy ``fail`` decode ends that stream with an error, and goes on with another's.
    """
    (prefill, decode), other = run.pair("p32x2", "d32"), run.servers["p32"]
    ids, beside = (prompt(run.scale.lengths[i], "killed") for i in (-1, 0))
    failed = metric(decode, ROOMS_FAILED)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(in_turn, other, decode, beside, KILLED_BESIDE)
        eventually(lambda: metric(decode, "vllm:num_requests_running") == 1, "decode computes")
        asked = pool.submit(at_once, prefill, decode, ids, TOKENS)
        eventually(lambda: not is_idle(prefill), "prefill computes")
        began = time.monotonic()
        prefill.signal(9)
        try:
            asked.result(FAIL_S)
        except RequestFailed as error:
            expect((error.server, error.status) == ("d32", 500), f"another failure: {error}")
            took_s = time.monotonic() - began
        except TimeoutError:
            raise CaseFailed(f"no answer within {FAIL_S:.0f} s of the kill") from None
        except OSError as error:
            raise CaseFailed(f"decode's connection broke: {error!r}") from error
        else:
            raise CaseFailed("the request was answered although its prefill was killed")
        expect(not running.done(), "the other request ended before the kill was noticed")
        run.check(beside, running.result().tokens, "beside the failed request", KILLED_BESIDE)
    _until_idle(decode)
    expect(metric(decode, ROOMS_FAILED) > failed, "no room failed: the kill came too late")
    ids = prompt(run.scale.lengths[-2], "after a kill")
    answer = in_turn(run.servers["p32"], decode, ids, TOKENS)
    run.check(ids, answer.tokens, "a later prompt from another prefill")
    return f"the stream ended with error 500 after {took_s:.2f} s, another went on"


# ---------------------------------------------------------------- time to first token


def first_token_beside_nixl(run: VllmRun) -> str:
    """kvferry, its router and NixlConnector in alternation, all tokens compared with one server's.

    A stream that begins with prefill's token answers as one server without a cached prompt does.
    """
    kvferry, nixl, one = (
        run.pair("p16", "d16"),
        run.pair("nixl-p", "nixl-d"),
        run.servers["alone16"],
    )
    routers = [run.start_router(["p16"], "d16", side) for side in ("prefill", "decode")]
    ways = [
        _Way("kvferry in turn", kvferry[1], lambda ids: in_turn(*kvferry, ids, TIMED_TOKENS)),
        _Way("kvferry at once", kvferry[1], lambda ids: at_once(*kvferry, ids, TIMED_TOKENS)),
        _Way(EARLY, kvferry[1], lambda ids: alone(routers[0], ids, TIMED_TOKENS)),
        _Way("router, decode first", kvferry[1], lambda ids: alone(routers[1], ids, TIMED_TOKENS)),
        _Way("NixlConnector", nixl[1], lambda ids: in_turn(*nixl, ids, TIMED_TOKENS)),
    ]
    # Differences fail the case when everything has been measured.
    different: list[str] = []
    differences: list[str] = []
    for length in run.scale.timed_lengths:
        cold: list[VllmAnswer] = []
        # The first two repetitions connect the pairs and compile kernels.
        for repeat in range(-2, run.repeats):
            for way in _rotated(ways, repeat):
                ids = prompt(length, f"{way.name}-{repeat}")
                answer = way.timed(ids, is_counted=repeat >= 0)
                cold.append(alone(one, ids, TIMED_TOKENS))
                wanted = cold[-1] if way.name == EARLY else alone(one, ids, TIMED_TOKENS)
                if answer.tokens != wanted.tokens:
                    agree = agreement(answer.tokens, wanted.tokens)
                    different.append(f"{way.name}, {length} tokens, after {agree}")
        apart = shown_difference(ways[0].first_ms, ways[-1].first_ms)
        differences.append(f"{length} tokens {apart}")
        figures = {way.name: way.figures() for way in ways}
        figures["one server"] = _figures(cold[2 * len(ways) :], [])
        for name, figure in figures.items():
            run.figures.append({"tokens": length, "way": name} | figure)
            say(f"{length} tokens, {name}: {figure}")
    expect(not different, f"other tokens than one server's: {different}")
    early, begun = ways[2].num_with_text, metric(routers[0], BEGUN)
    expect(early == begun, f"{begun:.0f} of {early} streams began with prefill's token")
    turn = f"in turn, kvferry - NixlConnector: {', '.join(differences)}"
    return f"medians of {run.repeats}, all tokens equal; {turn}"


class _Way:
    """One way to ask, and its measurements since the last ``figures``."""

    def __init__(
        self, name: str, decode: Server, ask: Callable[[Sequence[int]], VllmAnswer]
    ) -> None:
        self.name = name
        self._decode = decode
        self._ask = ask
        self._answers: list[VllmAnswer] = []
        self._transfers_s: list[float] = []
        # Answers whose first token has a text, which a special one lacks.
        self.num_with_text = 0

    def timed(self, ids: Sequence[int], *, is_counted: bool) -> VllmAnswer:
        """Ask, and keep the times."""
        (seconds, count) = transfers(self._decode)
        answer = self._ask(ids)
        (later, number) = transfers(self._decode)
        self.num_with_text += answer.tokens[0] >= FIRST_WORD
        if is_counted:
            self._answers.append(answer)
            if number > count:
                self._transfers_s.append((later - seconds) / (number - count))
        return answer

    @property
    def first_ms(self) -> list[float]:
        """Times to the first token, in order."""
        return [answer.first_ms for answer in self._answers]

    def figures(self) -> dict[str, float | None]:
        """Return the figures and forget the measurements."""
        figures = _figures(self._answers, self._transfers_s)
        self._answers, self._transfers_s = [], []
        return figures


def _figures(answers: Sequence[VllmAnswer], transfers_s: Sequence[float]) -> dict[str, Any]:
    first = sorted(answer.first_ms for answer in answers)
    prefill = [answer.prefill_ms for answer in answers if answer.prefill_ms]
    return {
        "first_ms": round(statistics.median(first), 2),
        "least_ms": round(first[0], 2),
        "most_ms": round(first[-1], 2),
        "second_ms": round(statistics.median(answer.second_ms for answer in answers), 2),
        "prefill_ms": round(statistics.median(prefill), 2) if prefill else None,
        "transfer_ms": round(1e3 * statistics.median(transfers_s), 2) if transfers_s else None,
    }


def _rotated(ways: list[_Way], by: int) -> Iterator[_Way]:
    """Yield ways from another one on each time, so that none is always first."""
    by %= len(ways)
    yield from ways[by:] + ways[:by]


# ---------------------------------------------------------------- the list


def warm_up(run: VllmRun, names: Sequence[str]) -> None:
    """Compile the kernels of all servers at the same time."""

    def warm(server: Server) -> None:
        for length in run.scale.timed_lengths:
            # A server that fails here fails its cases, with the reason.
            with suppress(OSError, RequestFailed):
                post(server, COMPLETIONS, body(prompt(length, "warm"), 4), WARM_UP_S)

    serving = [run.servers[name] for name in names if name != "discovery"]
    with ThreadPoolExecutor(len(serving)) as pool:
        list(pool.map(warm, [server for server in serving if server.is_up]))


def cases(*, is_cuda: bool) -> list[Case[VllmRun]]:
    """Return all cases, in an order that ends servers early and measures on a quiet machine."""
    only_cuda = None if is_cuda else "needs a GPU"
    base = ("discovery", "alone32")
    return [
        Case(tp1_to_tp1, (*base, "p32", "d32")),
        Case(tp2_to_tp1, (*base, "p32x2", "d32")),
        Case(tp1_to_tp2, (*base, "p32", "d32x2")),
        Case(chunked_prefill, (*base, "p32", "d32")),
        Case(prefix_hits_at_decode, (*base, "p32", "d32")),
        Case(sixteen_at_once_through_the_router, (*base, "p32", "d32")),
        Case(skipped_transfer_changes_the_answer, (*base, "p32", "skipping")),
        Case(offloading_beside_kvferry, (*base, "multi-p", "multi-d"), only_cuda),
        Case(simple_offloading_beside_kvferry, (*base, "simple-p", "simple-d"), only_cuda),
        Case(abort_frees_both_sides, (*base, "p32", "d32")),
        Case(captured_graphs_in_bfloat16, ("discovery", "alone16", "p16", "d16")),
        Case(links_take_cuda, ("p32", "p32x2", "p16"), only_cuda),
        Case(killed_prefill_fails_only_its_request, (*base, "p32x2", "d32", "p32")),
        Case(terminated_prefill_fails_no_request, (*base, "drain-p", "p32", "d32")),
        Case(
            first_token_beside_nixl,
            ("discovery", "alone16", "p16", "d16", "nixl-p", "nixl-d"),
        ),
        Case(load_beside_nixl, ("discovery", *WIDE), on_request=True),
    ]
