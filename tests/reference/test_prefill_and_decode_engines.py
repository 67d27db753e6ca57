"""One engine computes the prompt, another the answer; a test's own hands carry the cache.

The bytes are moved by kvferry's plan and binding, between real ranks that shard
and page differently. The transport is a file that both can reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from reference.driving import (
    ALL,
    MAX_STEPS,
    PROMPTS,
    Answer,
    FileBacked,
    Watching,
    ask,
    demand_equal,
    drain,
    engine_of,
    works_of,
)

from kvferry.errors import InputError, Misuse
from kvferry.layout.layout import Order, Parallel
from kvferry.memory.copy.reference import copy_pieces
from kvferry.plan import PagedView, PageTable, RankPair, bind, check, contiguous_pools, reshard
from kvferry.plan import Request as Length
from kvferry.reference.engine.cache import one_region
from kvferry.reference.engine.engine import Engine
from kvferry.reference.engine.requests import (
    Admitted,
    EngineRequest,
    EngineRole,
    Produced,
    Sample,
)
from kvferry.reference.models.config import KV
from kvferry.reference.models.tiny import TinyKind

Models = dict[TinyKind, Path]


class Ferry(NamedTuple):
    """One side: an engine whose memory lies in files, and a request's place in it."""

    engine: Engine
    files: FileBacked
    place: Admitted

    def side(self, rank: int) -> PagedView:
        blocks = self.engine.scheduler.blocks
        pools = contiguous_pools(self.engine.layout, rank, blocks.num_pages)
        return PagedView(one_region(pools).map, {KV: PageTable(self.place.pages)})


def carry(source: Ferry, target: Ferry, num_tokens: int) -> int:
    """Copy what the target lacks; the number of bytes."""
    plan = reshard(source.engine.layout, target.engine.layout)
    check(plan)
    length = Length(num_tokens, target.place.prefix)
    num_bytes = 0
    for a in range(plan.source.num_ranks):
        for b in range(plan.target.num_ranks):
            binding = bind(plan, RankPair(a, b), length, source.side(a), target.side(b))
            memory = source.files.memory(a), target.files.memory(b)
            copy_pieces(binding.descriptors(), [memory[0]], [memory[1]])
            num_bytes += binding.num_bytes
    return num_bytes


def admit(engine: Engine, request: EngineRequest) -> Admitted:
    engine.add(request)
    for _ in range(MAX_STEPS):
        for output in engine.step():
            if isinstance(output, Admitted):
                return output
    raise AssertionError("never admitted")


def prefill(engine: Engine, files: FileBacked, request: EngineRequest) -> tuple[Ferry, Sample]:
    """Run a prompt to its first token; its pages are held."""
    place = None
    engine.add(request)
    for _ in range(MAX_STEPS):
        for output in engine.step():
            match output:
                case Admitted():
                    place = output
                case Produced(sample=sample):
                    assert place is not None
                    assert engine.step() == []
                    assert engine.scheduler.blocks.num_used == len(place.pages)
                    return Ferry(engine, files, place), sample
    raise AssertionError("no first token")


def half(role: EngineRole, name: str = "r", prompt: tuple[int, ...] = PROMPTS[2]) -> EngineRequest:
    return EngineRequest(
        id=name, prompt=prompt, max_tokens=12, sampling=ALL, ignore_end=True, role=role
    )


def files_in(folder: Path) -> FileBacked:
    folder.mkdir()
    return FileBacked(folder)


def ferried(
    here: Engine, files: FileBacked, there: Engine, into: FileBacked, *, copy: bool
) -> Answer:
    """A prompt computed here and answered there."""
    source, first = prefill(here, files, half(EngineRole.PREFILL))
    target = Ferry(there, into, admit(there, half(EngineRole.DECODE)))
    assert there.step() == []
    if copy:
        assert carry(source, target, len(PROMPTS[2])) > 0
    here.scheduler.release("r")
    assert here.scheduler.blocks.num_used == 0
    answer = Answer()
    answer.take(there.arrived("r", first))
    rest = drain(there)["r"]
    answer.tokens += rest.tokens
    answer.tops += rest.tops
    return answer


# Other shardings are in test_transfer.py, where endpoints carry them.
@pytest.mark.parametrize(
    ("kind", "source"),
    [(TinyKind.LLAMA, Parallel()), (TinyKind.QWEN3, Parallel(tp=2))],
    ids=str,
)
def test_decode_continues_from_a_copied_cache(
    models: Models, tmp_path: Path, kind: TinyKind, source: Parallel
) -> None:
    files, into = files_in(tmp_path / "source"), files_in(tmp_path / "target")
    with (
        engine_of(models[kind], source, files, page=16) as here,
        engine_of(models[kind], Parallel(), into, page=32, order=Order.HND) as there,
    ):
        answer = ferried(here, files, there, into, copy=True)
    # Afterwards, on an engine that never saw it: nothing of the transfer can help.
    with engine_of(models[kind]) as engine:
        (alone,) = ask(engine, [half(EngineRole.WHOLE)])
    demand_equal([alone], [answer])


@pytest.mark.parametrize("kind", TinyKind)
def test_without_the_copy_the_answer_is_wrong(
    models: Models, tmp_path: Path, kind: TinyKind
) -> None:
    """The negative control: the comparison above can fail."""
    files, into = files_in(tmp_path / "source"), files_in(tmp_path / "target")
    with (
        engine_of(models[kind], extend=files) as here,
        engine_of(models[kind], extend=into) as there,
    ):
        answer = ferried(here, files, there, into, copy=False)
    with engine_of(models[kind]) as engine:
        (alone,) = ask(engine, [half(EngineRole.WHOLE)])
    assert answer.tokens[0] == alone.tokens[0]
    assert answer.tokens != alone.tokens


def test_a_repeated_prompt_needs_only_what_is_new(models: Models, tmp_path: Path) -> None:
    files, into = files_in(tmp_path / "source"), files_in(tmp_path / "target")
    aligned = PROMPTS[2][:144]
    with (
        engine_of(models[TinyKind.LLAMA], extend=files) as here,
        engine_of(models[TinyKind.LLAMA], extend=into) as there,
    ):
        answers, sizes = [], []
        for name, prompt in (("a", aligned), ("b", aligned), ("c", (*aligned, 5))):
            source, first = prefill(here, files, half(EngineRole.PREFILL, name, prompt))
            target = Ferry(there, into, admit(there, half(EngineRole.DECODE, name, prompt)))
            sizes.append((target.place.prefix, carry(source, target, len(prompt))))
            here.scheduler.release(name)
            answer = Answer()
            answer.take(there.arrived(name, first))
            answer.tokens += drain(there)[name].tokens
            answers.append(answer.tokens)
    token_bytes = 6 * 3 * 16 * 2 * 4
    assert sizes == [(0, 144 * token_bytes), (144, 0), (144, token_bytes)]
    with engine_of(models[TinyKind.LLAMA]) as engine:
        alone = ask(
            engine,
            [half(EngineRole.WHOLE, n, p) for n, p in (("a", aligned), ("c", (*aligned, 5)))],
        )
    assert answers == [alone[0].tokens, alone[0].tokens, alone[1].tokens]


def test_a_prefix_that_prefill_has_is_not_computed_again(models: Models, tmp_path: Path) -> None:
    with engine_of(models[TinyKind.LLAMA], extend=Watching) as engine:
        ask(engine, [half(EngineRole.WHOLE, "before")])
        engine.add(half(EngineRole.PREFILL))
        outputs = engine.step()
        assert [o.prefix for o in outputs if isinstance(o, Admitted)] == [144]
        assert works_of(engine, "r") == [(144, 150)]
        engine.scheduler.release("r")


def test_pages_that_a_transfer_may_touch_outlive_a_cancel(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA], step_tokens=64) as engine:
        blocks = engine.scheduler.blocks
        engine.add(half(EngineRole.PREFILL, "prefill"))
        engine.add(half(EngineRole.DECODE, "decode"))
        engine.step()
        used = blocks.num_used
        for name in ("prefill", "decode"):
            assert engine.scheduler.cancel(name) is True
            assert engine.scheduler.cancel(name) is True
        assert engine.step() == []
        assert blocks.num_used == used > 0
        for name in ("prefill", "decode"):
            engine.scheduler.release(name)
            with pytest.raises(Misuse, match="no pages"):
                engine.scheduler.release(name)
        assert engine.idle
        assert blocks.num_used == 0
        blocks.check()


def test_steps_that_do_not_fit_are_refused(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA]) as engine:
        admit(engine, half(EngineRole.DECODE))
        with pytest.raises(InputError, match="first token"):
            engine.arrived("r", Sample("r", 999))
        engine.arrived("r", Sample("r", 3))
        with pytest.raises(Misuse, match="not ARRIVING"):
            engine.arrived("r", Sample("r", 3))
        with pytest.raises(Misuse, match="cancel it"):
            engine.scheduler.release("r")
        assert engine.scheduler.cancel("r") is False
        assert engine.idle


def test_a_first_token_can_be_the_whole_answer(models: Models) -> None:
    with engine_of(models[TinyKind.LLAMA]) as engine:
        for first, finish in ((256, "stop"), (65, "length")):
            engine.add(EngineRequest(id="r", prompt=(1, 2), max_tokens=1, role=EngineRole.DECODE))
            engine.step()
            produced = engine.arrived("r", Sample("r", first))
            assert produced.finish == finish
            assert produced.text == ("" if first == 256 else "A")
            assert engine.idle
            assert engine.scheduler.blocks.num_used == 0
