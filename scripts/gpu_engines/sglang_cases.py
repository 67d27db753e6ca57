"""The cases of SGLang: answers of pairs against one server's, failures, and time to first token.

Prefill computes the first token, so a pair answers as one server does that cuts the prompt into the
same chunks, in bfloat16 too. Different tensor parallelism is compared in float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from gpu_engines.checklist import Case, CaseFailed, agreement, eventually, expect, expect_equal
from gpu_engines.client import Json, RequestFailed, get, leave_early, metric, post
from gpu_engines.servers import Server, Servers, Spec, say
from gpu_engines.sglang_servers import (
    GENERATE,
    SglangAnswer,
    SglangServers,
    alone,
    at_once,
    body,
    is_idle,
    new_room,
    prompt,
)

TOKENS = 12
TIMED_TOKENS = 2
AT_ONCE = 16
# SGLang's time limits for a room are 60 s each.
FAIL_S = 40.0
WARM_UP_S = 240.0
MOVED_MB = "sglang:kv_transfer_total_mb_sum"
MOVED_MS = "sglang:kv_transfer_latency_ms"


class SglangRun:
    """Shared state of the cases: servers and measured figures."""

    def __init__(self, servers: Servers, commands: SglangServers, repeats: int) -> None:
        self.servers = servers
        self.commands = commands
        self.scale = commands.scale
        self.repeats = repeats
        self.figures: list[dict[str, Any]] = []

    def pair(self, prefill: str, decode: str) -> tuple[Server, Server]:
        """Return two servers."""
        return self.servers[prefill], self.servers[decode]

    def expected(self, ids: Sequence[int]) -> list[int]:
        """Return the answer of one server, in float32."""
        return alone(self.servers["alone32"], ids, TOKENS).tokens

    def check_pair(self, prefill: str, decode: str) -> str:
        """Compare a pair's answers with one server's."""
        pair = self.pair(prefill, decode)
        for length in self.scale.lengths:
            ids = prompt(length, f"{prefill}-{decode}")
            answer = at_once(*pair, ids, TOKENS)
            expect_equal(answer.tokens, self.expected(ids), f"{length} tokens")
        return f"prompts of {self.scale.lengths} tokens, {TOKENS} tokens equal"

    def start(self, spec: Spec) -> Server:
        """Start one more server and wait for it."""
        self.servers.start([spec])
        self.servers.wait(30.0)
        server = self.servers[spec.name]
        expect(server.is_up, f"{spec.name}: {server.failure}")
        return server


# ---------------------------------------------------------------- equality


def tp1_to_tp1(run: SglangRun) -> str:
    """Different page sizes."""
    return run.check_pair("p32", "d32")


def tp2_to_tp1(run: SglangRun) -> str:
    return run.check_pair("p32x2", "d32")


def tp1_to_tp2(run: SglangRun) -> str:
    return run.check_pair("p32", "d32x2")


def chunked_prefill(run: SglangRun) -> str:
    """A prompt of several steps; the log lists them."""
    length, prefill = run.scale.lengths[-1], run.servers["p32"]
    least = -(-length // run.scale.chunk)
    expect(least > 1, f"a chunk of {run.scale.chunk} holds the whole prompt")
    before = len(prefill.log_lines("Prefill batch"))
    ids = prompt(length, "chunked")
    answer = at_once(*run.pair("p32", "d32"), ids, TOKENS)
    expect_equal(answer.tokens, run.expected(ids), f"{length} tokens")
    steps = len(prefill.log_lines("Prefill batch")) - before
    expect(steps >= least, f"prefill took {steps} steps of at most {run.scale.chunk} tokens")
    return f"{length} tokens in {steps} steps"


def prefix_hits_at_decode(run: SglangRun) -> str:
    """The second prompt shares most of the first, so less is transferred."""
    length, (prefill, decode) = run.scale.lengths[-1], run.pair("p32", "d32")
    begin = prompt(length - run.scale.pages[-1], "shared")
    sent = []
    for end in ("first", "second"):
        ids = begin + prompt(run.scale.pages[-1], end)
        before = metric(prefill, MOVED_MB)
        answer = at_once(prefill, decode, ids, TOKENS)
        sent.append(_moved_mb(prefill, since=before))
        expect_equal(answer.tokens, run.expected(ids), f"{end} prompt")
    expect(0 < sent[1] < sent[0] / 2, f"{sent[0]:.1f} MB were sent, and then {sent[1]:.1f}")
    return f"{sent[0]:.1f} MB, then {sent[1]:.1f} MB"


def _moved_mb(prefill: Server, since: float) -> float:
    """Return the megabytes that a prefill has sent, once there are any."""
    eventually(lambda: metric(prefill, MOVED_MB) > since, "the room is counted")
    return metric(prefill, MOVED_MB) - since


def sixteen_at_once(run: SglangRun) -> str:
    longest = run.scale.lengths[-1]
    prompts = [prompt(1 + longest * i // AT_ONCE, "at once") for i in range(AT_ONCE)]
    pair = run.pair("p32", "d32")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda ids: at_once(*pair, ids, TOKENS), prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        expect_equal(answer.tokens, run.expected(ids), f"{len(ids)} tokens")
    return f"{AT_ONCE} prompts of up to {longest} tokens at once, all equal"


def kvferrys_router(run: SglangRun) -> str:
    router = run.start(run.commands.own_router(*run.pair("p32", "d32")))
    eventually(
        lambda: all(worker["up"] for worker in get(router, "/healthz")["workers"]),
        "the router sees both servers",
    )
    for length in run.scale.lengths[-2:]:
        words = " ".join(f"w{token}" for token in prompt(length, "router"))
        asked: Json = {"model": "m", "prompt": words, "max_tokens": TOKENS, "temperature": 0}
        texts = [
            post(server, "/v1/completions", asked | {"ignore_eos": True})["choices"][0]["text"]
            for server in (router, run.servers["alone32"])
        ]
        expect(texts[0] == texts[1] != "", f"{length} tokens: {texts}")
    return f"prompts of {run.scale.lengths[-2:]} tokens, texts equal"


def sglangs_router(run: SglangRun) -> str:
    router = run.start(run.commands.sglang_router(*run.pair("p32", "d32")))
    for length in run.scale.lengths[-2:]:
        ids = prompt(length, "sglang's router")
        answer = post(router, GENERATE, body(ids, TOKENS))
        expect_equal(answer["output_ids"], run.expected(ids), f"{length} tokens")
    return f"prompts of {run.scale.lengths[-2:]} tokens, {TOKENS} tokens equal"


def overlap_scheduling(run: SglangRun) -> str:
    """The servers of all cases schedule the next step while the GPU computes."""
    for name in ("p32", "d32", "p16", "d16"):
        told = get(run.servers[name], "/get_server_info")
        expect(told.get("disable_overlap_schedule") is False, f"{name} has no overlap scheduling")
    return "on at p32, d32, p16 and d16"


def bfloat16_from_the_same_chunks(run: SglangRun) -> str:
    one = run.servers["alone16"]
    for prefill, decode in (("p16", "d16"), ("p16-nixl", "d16-nixl")):
        for length in run.scale.timed_lengths:
            ids = prompt(length, "bfloat16")
            answer = at_once(*run.pair(prefill, decode), ids, TOKENS)
            wanted = alone(one, ids, TOKENS).tokens
            expect_equal(answer.tokens, wanted, f"{prefill}, {length} tokens")
    return f"cuda and NIXL, prompts of {run.scale.timed_lengths} tokens, {TOKENS} tokens equal"


def wrong_pages_change_the_answer(run: SglangRun) -> str:
    """Negative control: prefill sends other pages than the request's."""
    agree = []
    for length in run.scale.lengths[1:]:
        ids = prompt(length, "wrong")
        answer = at_once(*run.pair("p32", "d32"), ids, TOKENS, new_room(is_wrong=True))
        agree.append(agreement(answer.tokens, run.expected(ids)))
    # Prefill sends the first token itself.
    expect(max(agree) < TOKENS, f"the answers are right with wrong pages: {agree} of {TOKENS}")
    return f"{agree} of {TOKENS} tokens agree with wrong pages"


def links_take_their_transport(run: SglangRun) -> str:
    """``auto`` selected CUDA IPC, and the pair that was told so uses NIXL."""
    wanted = {"p32": "cuda", "p32x2": "cuda", "p16": "cuda", "p16-nixl": "nixl"}
    found = {}
    for name in wanted:
        lines = run.servers[name].log_lines("connected endpoint=", "transport=")
        words = [word for line in lines for word in line.split() if word.startswith("transport=")]
        found[name] = ",".join(sorted({word.removeprefix("transport=") for word in words}))
    expect(found == wanted, f"transports by prefill: {found}")
    return f"{found}"


# ---------------------------------------------------------------- failures


def abort_frees_both_sides(run: SglangRun) -> str:
    """A client leaves while decode waits for a prompt that is not computed."""
    prefill, decode = run.pair("p32", "d32")
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap}
    asked = body(prompt(run.scale.lengths[-1], "left"), TOKENS, stream=True, **place)
    connection = leave_early(decode, GENERATE, asked | {"bootstrap_room": new_room()})
    eventually(lambda: not is_idle(decode), "decode has the request")
    connection.close()
    took_s = eventually(lambda: is_idle(decode), "decode frees its pages", FAIL_S)
    asked = body(prompt(run.scale.lengths[-1], "aborted"), TOKENS, rid="given-up", **place)
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(_status, prefill, asked | {"bootstrap_room": new_room()})
        eventually(lambda: not is_idle(prefill), "prefill has the request")
        post(prefill, "/abort_request", {"rid": "given-up"})
        computed.result(FAIL_S)
    eventually(lambda: is_idle(prefill), "prefill frees its pages", FAIL_S)
    ids = prompt(run.scale.lengths[-1], "after an abort")
    expect_equal(at_once(prefill, decode, ids, TOKENS).tokens, run.expected(ids), "a later prompt")
    return f"decode was idle again after {took_s:.1f} s"


def _status(server: Server, asked: Json) -> int:
    """Return the status of an answer."""
    try:
        post(server, GENERATE, asked)
    except RequestFailed as error:
        return error.status
    return 200


def killed_prefill_fails_only_its_request(run: SglangRun) -> str:
    """Both ranks of a prefill are killed while they compute; decode answers with an error."""
    prefill, decode = run.pair("p32x2", "d32")
    ids = prompt(run.scale.lengths[-1], "killed")
    batches = len(prefill.log_lines("Prefill batch"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(at_once, prefill, decode, ids, TOKENS)
        eventually(
            lambda: len(prefill.log_lines("Prefill batch")) > batches or asked.done(),
            "prefill computes",
        )
        began = time.monotonic()
        prefill.signal(9)
        try:
            asked.result(FAIL_S)
        except RequestFailed as error:
            expect((error.server, error.status) == ("d32", 500), f"another failure: {error}")
            took_s, told = time.monotonic() - began, str(error)
        except TimeoutError:
            raise CaseFailed(f"no answer within {FAIL_S:.0f} s of the kill") from None
        except OSError as error:
            raise CaseFailed(f"a connection broke before decode's answer: {error!r}") from error
        else:
            raise CaseFailed("the request was answered although its prefill was killed")
    expect("peer-gone" in told, f"decode gives another reason: {told}")
    eventually(lambda: is_idle(decode), "decode frees its pages", FAIL_S)
    ids = prompt(run.scale.lengths[-1], "after a kill")
    answer = at_once(run.servers["p32"], decode, ids, TOKENS)
    expect_equal(answer.tokens, run.expected(ids), "a later prompt from another prefill")
    return f"decode gave up after {took_s:.2f} s: {told[:120]}"


# ---------------------------------------------------------------- time to first token


def first_token_beside_sglangs_nixl(run: SglangRun) -> str:
    """kvferry over cuda and NIXL and SGLang's own NIXL in alternation, tokens compared."""
    ways = [
        _Way("kvferry cuda", *run.pair("p16", "d16")),
        _Way("kvferry nixl", *run.pair("p16-nixl", "d16-nixl")),
        _Way("SGLang nixl", *run.pair("sglang-p", "sglang-d")),
    ]
    # Differences fail the case when everything has been measured.
    different: list[str] = []
    for length in run.scale.timed_lengths:
        cold: list[SglangAnswer] = []
        # The first repetition connects the pairs and compiles kernels.
        for repeat in range(-1, run.repeats):
            ids = prompt(length, f"timed-{repeat}")
            one = alone(run.servers["alone16"], ids, TIMED_TOKENS)
            cold += [one] if repeat >= 0 else []
            by = repeat % len(ways)
            for way in ways[by:] + ways[:by]:
                answer = way.timed(ids, is_counted=repeat >= 0)
                if answer.tokens != one.tokens:
                    different.append(f"{way.name}, {length} tokens")
        figures = {way.name: way.figures() for way in ways}
        figures["one server"] = _figures([answer.first_ms for answer in cold], [])
        for name, figure in figures.items():
            run.figures.append({"tokens": length, "way": name} | figure)
            say(f"{length} tokens, {name}: {figure}")
    expect(not different, f"other tokens than one server's: {different}")
    return f"medians of {run.repeats}, all tokens equal"


class _Way:
    """A pair, and its measurements since the last ``figures``."""

    def __init__(self, name: str, prefill: Server, decode: Server) -> None:
        self.name = name
        self._prefill = prefill
        self._decode = decode
        self._first_ms: list[float] = []
        self._moved_ms: list[float] = []

    def timed(self, ids: Sequence[int], *, is_counted: bool) -> SglangAnswer:
        """Ask, and keep the times."""
        before = self._moved()
        answer = at_once(self._prefill, self._decode, ids, TIMED_TOKENS)
        after = self._moved()
        if is_counted:
            self._first_ms.append(answer.first_ms)
            if after[1] > before[1]:
                self._moved_ms.append((after[0] - before[0]) / (after[1] - before[1]))
        return answer

    def figures(self) -> dict[str, float | None]:
        """Return the figures and forget the measurements."""
        figures = _figures(self._first_ms, self._moved_ms)
        self._first_ms, self._moved_ms = [], []
        return figures

    def _moved(self) -> tuple[float, float]:
        """Return milliseconds and number of the transfers that SGLang counted."""
        return metric(self._prefill, f"{MOVED_MS}_sum"), metric(self._prefill, f"{MOVED_MS}_count")


def _figures(first_ms: Sequence[float], moved_ms: Sequence[float]) -> dict[str, float | None]:
    return {
        "first_ms": round(statistics.median(first_ms), 2),
        "least_ms": round(min(first_ms), 2),
        "most_ms": round(max(first_ms), 2),
        "transfer_ms": round(statistics.median(moved_ms), 2) if moved_ms else None,
    }


# ---------------------------------------------------------------- the list


def warm_up(run: SglangRun, names: Sequence[str]) -> None:
    """Compile the kernels of all servers at the same time, pairs as pairs."""

    def warm(ask: Callable[[Sequence[int]], SglangAnswer], lengths: Sequence[int]) -> None:
        for length in lengths:
            # A server that fails here fails its cases, with the reason.
            with suppress(OSError, RequestFailed, KeyError):
                ask(prompt(length, "warm"))

    up = [name for name in names if run.servers[name].is_up]
    pairs = [pair for pair in PAIRS if set(pair) <= set(up)]
    with ThreadPoolExecutor(16) as pool:
        for prefill, decode in pairs:
            lengths = run.scale.lengths[-2:] if "32" in prefill else run.scale.timed_lengths[:2]
            ask = _asking(run, prefill, decode)
            pool.submit(warm, ask, lengths)
        for name in {"alone32", "alone16"} & set(up):
            lengths = run.scale.lengths[-2:] if "32" in name else run.scale.timed_lengths[:2]
            pool.submit(warm, _asking_one(run, name), lengths)


def _asking(run: SglangRun, prefill: str, decode: str) -> Callable[[Sequence[int]], SglangAnswer]:
    return lambda ids: at_once(*run.pair(prefill, decode), ids, TOKENS)


def _asking_one(run: SglangRun, name: str) -> Callable[[Sequence[int]], SglangAnswer]:
    return lambda ids: alone(run.servers[name], ids, TOKENS)


PAIRS = (
    ("p32", "d32"),
    ("p32x2", "d32"),
    ("p32", "d32x2"),
    ("p16", "d16"),
    ("p16-nixl", "d16-nixl"),
    ("sglang-p", "sglang-d"),
)


def cases(*, is_cuda: bool) -> list[Case[SglangRun]]:
    """Return all cases, in an order that ends servers early and measures on a quiet machine."""
    only_cuda = None if is_cuda else "needs a GPU"
    timed = ("alone16", "p16", "d16", "p16-nixl", "d16-nixl")
    return [
        Case(tp1_to_tp1, ("alone32", "p32", "d32")),
        Case(tp2_to_tp1, ("alone32", "p32x2", "d32")),
        Case(tp1_to_tp2, ("alone32", "p32", "d32x2")),
        Case(chunked_prefill, ("alone32", "p32", "d32")),
        Case(prefix_hits_at_decode, ("alone32", "p32", "d32")),
        Case(sixteen_at_once, ("alone32", "p32", "d32")),
        Case(kvferrys_router, ("alone32", "p32", "d32")),
        Case(sglangs_router, ("alone32", "p32", "d32")),
        Case(overlap_scheduling, ("p32", "d32", "p16", "d16"), only_cuda),
        Case(wrong_pages_change_the_answer, ("alone32", "p32", "d32")),
        Case(abort_frees_both_sides, ("alone32", "p32", "d32")),
        Case(bfloat16_from_the_same_chunks, timed),
        Case(links_take_their_transport, ("p32", "p32x2", "p16", "p16-nixl"), only_cuda),
        Case(killed_prefill_fails_only_its_request, ("alone32", "p32", "p32x2", "d32")),
        Case(first_token_beside_sglangs_nixl, (*timed, "sglang-p", "sglang-d"), only_cuda),
    ]
