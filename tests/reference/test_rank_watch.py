"""A rank that is stopped, or a step that does not end, is noticed in bounded time."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from reference.clusters import family, processes, wait_until
from reference.driving import PROMPTS, ask, engine_of, requests
from reference.working import PATIENCE_S, Caller, Worker, apart, body_of, call, hosted, options_for

from kvferry.errors import InputError
from kvferry.layout.layout import Parallel
from kvferry.reference.engine.steps import StepPlan
from kvferry.reference.models.tiny import TinyKind
from kvferry.reference.ranks.processes import RankLost
from kvferry.reference.ranks.rank import Extension
from kvferry.reference.ranks.watch import NUM_BEATS, Signs

Models = dict[TinyKind, Path]
# Long enough that a busy machine is not taken for a stopped rank.
LOST_S = 6.0


# ---------------------------------------------------------------- the decision


def looks(signs: Signs, upto: float, *, beating: tuple[int, ...]) -> tuple[float, str] | None:
    """Time passes; when the ranks are given up, and why."""
    for tick in range(1, 5000):
        now = tick * signs.look_s
        if now > upto:
            return None
        for rank in beating:
            signs.beat(rank, now)
        if reason := signs.verdict(now):
            return now, reason
    raise AssertionError("time is too long")


def two_ranks(lost_s: float = 16.0) -> Signs:
    return Signs({1: None, 2: None}, lost_s, 0.0)


def test_ranks_that_beat_are_well_for_ever() -> None:
    assert looks(two_ranks(), 500, beating=(1, 2)) is None


def test_a_silent_rank_is_lost_in_half_the_time() -> None:
    """Whoever was waiting for it has the other half to hear of it."""
    for began in (None, 0.0):
        signs = two_ranks()
        if began is not None:
            signs.began(began)
        when, why = looks(signs, 500, beating=(1,)) or (0.0, "")
        assert 8.0 + signs.look_s < when < 8.0 + 2.5 * signs.look_s
        assert why == "rank 2 has shown no sign of life for 8 s"


def test_a_rank_may_be_stopped_for_half_the_time_whenever_that_begins() -> None:
    """Its last beat may be one interval before it was stopped."""
    for tenths in range(1, 20):
        signs = two_ranks()
        last_beat = signs.look_s
        stopped = last_beat + 16.0 / NUM_BEATS * tenths / 20
        signs.beat(2, last_beat)
        when, _ = looks(signs, 500, beating=(1,)) or (0.0, "")
        assert 8.0 <= when - stopped <= 8.0 + 2 * signs.look_s


def test_a_step_may_take_so_long_though_every_rank_beats() -> None:
    signs = two_ranks()
    signs.began(0.0)
    when, why = looks(signs, 500, beating=(1, 2)) or (0.0, "")
    assert 16.0 < when < 16.0 + 1.5 * signs.look_s
    assert why.startswith("a step has not ended for 16 s")
    signs.ended()
    assert signs.verdict(18.0) is None


def test_a_rank_that_ends_is_left_to_the_step_which_knows_why() -> None:
    signs = two_ranks()
    signs.began(0.0)
    signs.gone(1)
    assert signs.verdict(1.0) is None
    signs.ended()
    assert signs.verdict(2.0) == "the process of rank 1 has ended"


def test_who_did_not_run_blames_nobody() -> None:
    """The driver was stopped too, or its machine was asleep."""
    signs = two_ranks()
    signs.began(0.0)
    assert signs.verdict(100.0) is None
    assert signs.verdict(101.0) is None
    assert [signs.verdict(100.0 + i) is None for i in range(2, 10)] == [True] * 7 + [False]


# ---------------------------------------------------------------- real ranks


class Hanging(Extension):
    """On the command "hang" rank 1 does not come back, though its process lives."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def before(self, plan: StepPlan) -> None:
        if self.rank == 1 and b"hang" in plan.commands:
            threading.Event().wait()


def test_a_step_that_hangs_ends_the_engine(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3), Hanging, lost_s=LOST_S / 2) as engine:
        ask(engine, requests(max_tokens=1))
        engine.post(b"hang")
        engine.add(requests()[0])
        with pytest.raises(RankLost, match=f"a step has not ended for {LOST_S / 2:g} s"):
            engine.step()
    assert not multiprocessing.active_children()


def test_a_rank_that_goes_on_in_time_costs_nothing(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], Parallel(tp=3), lost_s=LOST_S) as engine:
        before = ask(engine, requests(max_tokens=2))
        (stopped, *_) = [child.pid for child in multiprocessing.active_children() if child.pid]
        stop(stopped)
        os.kill(stopped, signal.SIGCONT)
        after = ask(engine, requests(max_tokens=2))
    assert [a.tokens for a in before] == [a.tokens for a in after]


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has taken effect."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it to stand still")


def test_a_stopped_rank_ends_its_worker_and_what_it_was_asked(models: Models) -> None:
    """In the middle of an answer, within ``lost_s``; the stopped process does not stay either."""
    options = options_for(
        "decode", models[TinyKind.LLAMA], None, Parallel(pp=2), engine={"lost_s": LOST_S}
    )
    with apart(options) as (worker,):
        assert worker.process is not None
        assert worker.process.pid is not None
        everyone = {worker.process.pid} | family(worker.process.pid)
        rank = only_rank(worker.process.pid)
        last = call(lambda caller: stopped_meanwhile(caller, worker, rank))
        worker.process.join(PATIENCE_S)
        assert worker.process.exitcode == 1
    assert '"code":"worker_lost"' in last
    assert f"rank 1 has shown no sign of life for {LOST_S / 2:g} s" in last
    wait_until(lambda: not everyone & set(processes()), "every process to end")


async def stopped_meanwhile(caller: Caller, worker: Worker, rank: int) -> str:
    body = body_of(PROMPTS[1], max_tokens=1900) | {"stream": True}
    async with caller.session.post(f"{worker.url}/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        stop(rank)
        async with asyncio.timeout(LOST_S):
            raw = await response.read()
    return [line for line in raw.decode().split("\n\n") if line][-1]


def only_rank(pid: int) -> int:
    """The process of a worker's second rank, which is a grandchild: a server forks them."""
    parents = processes()
    (rank,) = [one for one in family(pid) if parents.get(parents[one]) == pid]
    return rank


def test_health_says_which_rank_and_why(models: Models) -> None:
    """While nothing runs, so that no step could find it."""
    options = options_for(
        "prefill", models[TinyKind.LLAMA], None, Parallel(pp=2), engine={"lost_s": LOST_S}
    )

    async def talk(caller: Caller, url: str) -> tuple[int, dict[str, object]]:
        while True:
            async with caller.session.get(f"{url}/healthz") as response:
                if response.status != 200:
                    return response.status, await response.json()
            await asyncio.sleep(0.02)

    with hosted(options) as (worker,):
        (rank,) = [child.pid for child in multiprocessing.active_children()]
        assert rank is not None
        stop(rank)
        status, told = call(lambda caller: talk(caller, worker.url))
    assert (status, told["status"]) == (503, "ended")
    assert told["problem"] == (
        f"rank 1 has shown no sign of life for {LOST_S / 2:g} s; start the instance again"
    )


def test_a_limit_of_nothing_is_refused(models: Models) -> None:
    with pytest.raises(InputError, match="lost_s must be above 0"):
        engine_of(models[TinyKind.LLAMA], lost_s=0)
