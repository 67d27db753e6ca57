"""Text is shown in whole characters, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.reference.engine.text import TextStream
from kvferry.reference.models.tiny import TEMPLATE, byte_tokenizer
from kvferry.reference.models.tokenizer import Tokenizer, TokenizerSettings


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(tokens: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    text = TextStream(decode, stops)
    shown = []
    for token in tokens:
        shown.append(text.push(token))
        if text.stopped:
            return shown, True
    shown.append(text.end())
    return shown, text.stopped


@settings(deadline=None)
@given(st.text())
def test_pieces_add_up_and_no_character_is_halved(text: str) -> None:
    shown, _ = stream(text.encode())
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_do_not_hold_up_what_follows(garbage: bytes) -> None:
    shown, _ = stream(garbage + b" and then")
    assert "".join(shown).endswith("and then")


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    shown, _ = stream("a€".encode()[:-1])
    assert shown == ["a", "", "", "\ufffd"]


@settings(deadline=None)
@given(st.text(alphabet="ab#", max_size=30), st.lists(st.text("ab#", min_size=1), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    shown, stopped = stream(text.encode(), stops)
    found = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(found)
    # Of several that the same character completes, the one that begins first counts.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    completed = min(ends, default=len(text))
    cuts = [text[:completed].find(stop) for stop in stops if stop in text[:completed]]
    assert "".join(shown) == text[: min(cuts, default=len(text))]


def test_a_possible_stop_string_is_held_back() -> None:
    shown, stopped = stream(b"a##b##", ["###"])
    assert shown == ["a", "", "", "##b", "", "", "##"]
    assert not stopped


def test_bytes_are_tokens_of_the_small_models() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), TokenizerSettings(chat_template=TEMPLATE))
    text = "Grüße, 日本 🙂\n\t<end>"
    assert tokenizer.encode(text) == [*text.removesuffix("<end>").encode(), 256]
    assert tokenizer.decode(range(32, 127)) == "".join(map(chr, range(32, 127)))
    prompt = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert prompt == list(b"user: hi\nassistant: ")


def test_a_chat_template_can_refuse_and_reaches_nothing() -> None:
    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages[0]['role'] + 1 }}",
    ):
        tokenizer = Tokenizer(byte_tokenizer(), TokenizerSettings(chat_template=template))
        with pytest.raises(InputError, match="chat template"):
            tokenizer.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InputError, match="no chat template"):
        Tokenizer(byte_tokenizer(), TokenizerSettings()).chat([])
