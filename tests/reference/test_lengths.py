"""What can't fit is refused by its length, and what may fit is read within bounds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvferry.http.api_errors import ApiError
from kvferry.reference.api.bodies import Ask, Serving, parse_chat, parse_completion
from kvferry.reference.api.readers import LARGE_BYTES, BodyReaders, ReaderThreads
from kvferry.reference.engine.requests import EngineRole
from kvferry.reference.models.tiny import END, TEMPLATE, byte_tokenizer
from kvferry.reference.models.tokenizer import Settings, Tokenizer, TooLong

MAX_TOKENS = 100
PATIENCE_S = 30


class Watched(Tokenizer):
    """Remembers what it was given."""

    def __init__(self, template: str = TEMPLATE) -> None:
        super().__init__(byte_tokenizer(), Settings(chat_template=template))
        self.lengths: list[int] = []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, special=special)


def serving(tokenizer: Tokenizer) -> Serving:
    return Serving("m", tokenizer, MAX_TOKENS, EngineRole.WHOLE)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 1} | fields).encode()


def turns(*texts: str) -> bytes:
    return body(messages=[{"role": "user", "content": text} for text in texts])


Parse = Callable[[bytes, Serving], Ask]


@pytest.mark.parametrize(
    ("parse", "data", "param"),
    [
        (parse_completion, body(prompt="x" * (len(END) * MAX_TOKENS + 1)), "prompt"),
        (parse_completion, body(prompt=["é" * 300]), "prompt"),
        (parse_chat, turns("x" * 600), "messages"),
        (parse_chat, turns(*["x" * 60] * 10), "messages"),
        (parse_chat, turns(*[""] * (MAX_TOKENS + 1)), "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_never_cut_into_tokens(
    parse: Parse, data: bytes, param: str
) -> None:
    tokenizer = Watched()
    with pytest.raises(ApiError, match="maximum context length is 100 tokens") as refused:
        parse(data, serving(tokenizer))
    assert (refused.value.status, refused.value.body.param) == (400, param)
    assert refused.value.body.code == "context_length_exceeded"
    assert tokenizer.lengths == []


def test_a_text_that_just_fits_is_taken() -> None:
    """As many of the longest token as the context has, but for the answer's one."""
    tokenizer = Watched()
    ask = parse_completion(body(prompt=END * (MAX_TOKENS - 1)), serving(tokenizer))
    assert len(ask.request.prompt) == MAX_TOKENS - 1
    assert tokenizer.longest_bytes == len(END)


def test_a_template_that_never_ends_is_stopped() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}more {% endfor %}{% endfor %}"
    tokenizer = Watched(endless)
    with pytest.raises(TooLong, match="more than 500 bytes"):
        tokenizer.render([], 500)
    assert tokenizer.lengths == []


def trained(normalizer: normalizers.Normalizer | None, *, at_bytes: bool) -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet() if at_bytes else ["a", "가", "<0x00>"]
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    if at_bytes:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    if normalizer is not None:
        fast.normalizer = normalizer
    return Tokenizer(fast, Settings())


@settings(deadline=None)
@given(st.text(alphabet="aé가e\u0301\u1112\u1161\u11ab\u03b1\u0313\u0300\u0345 \n"))
def test_no_text_has_more_bytes_than_its_tokens_allow(text: str) -> None:
    for normalizer in (None, normalizers.NFC()):
        tokenizer = trained(normalizer, at_bytes=True)
        assert len(text.encode()) <= tokenizer.longest_bytes * len(tokenizer.encode(text))


def test_letters_count_as_bytes_only_where_they_are() -> None:
    assert trained(None, at_bytes=True).longest_bytes == 1
    assert trained(None, at_bytes=False).longest_bytes == len("<0x00>")


# ---------------------------------------------------------------- lanes


def test_a_small_body_does_not_wait_for_large_ones() -> None:
    async def talk() -> str:
        lanes, go = BodyReaders(), threading.Event()
        running = threading.Semaphore(0)

        def book() -> str:
            running.release()
            return "book" if go.wait(PATIENCE_S) else "late"

        books = [asyncio.create_task(lanes.read(LARGE_BYTES + 1, book)) for _ in range(3)]
        answer = await lanes.read(LARGE_BYTES, lambda: "question")
        assert await asyncio.to_thread(running.acquire, timeout=PATIENCE_S)
        # One at a time: the second has not begun.
        assert not running.acquire(blocking=False)
        go.set()
        assert await asyncio.gather(*books) == ["book"] * 3
        lanes.close()
        return answer

    assert asyncio.run(talk()) == "question"


def test_the_line_in_front_of_a_lane_is_bounded_also_by_callers_that_left() -> None:
    async def talk() -> None:
        lane, go = ReaderThreads("test", num_threads=1, most=2), threading.Event()
        began = threading.Event()

        def stay() -> bool:
            began.set()
            return go.wait(PATIENCE_S)

        first = asyncio.create_task(lane.run(stay))
        await asyncio.to_thread(began.wait, PATIENCE_S)
        first.cancel()
        second = asyncio.create_task(lane.run(lambda: True))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many prompts wait") as refused:
            await lane.run(lambda: True)
        assert (refused.value.status, refused.value.body.code) == (503, "busy")
        go.set()
        assert await second
        assert await lane.run(lambda: True)
        lane.close()

    asyncio.run(talk())
