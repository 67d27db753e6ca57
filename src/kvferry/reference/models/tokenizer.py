"""A tokenizer, from a model folder: text to tokens and back, and conversations to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from kvferry import InputError

Message = Mapping[str, object]

# What a normaliser may make of a text: composing it (NFC) leaves at least a third of its bytes.
MOST_SHRUNK = 3


class TooLong(InputError):
    """A text that has more bytes than it may have."""


class Settings(msgspec.Struct):
    """What is used of ``tokenizer_config.json``."""

    chat_template: object = None
    bos_token: object = None
    eos_token: object = None


class Tokenizer:
    """A model's tokenizer and its chat template."""

    def __init__(self, fast: FastTokenizer, settings: Settings) -> None:
        self._fast = fast
        self._settings = settings

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and what is beside it."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json; give the folder of a whole model")
        try:
            # The library has no error class of its own.
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            raise InputError(f"{path} can't be read ({error}); download it again") from None
        return Tokenizer(fast, _settings(folder))

    @cached_property
    def longest_bytes(self) -> int:
        """No token stands for more bytes of a text than this."""
        added = {token.content for token in self._fast.get_added_tokens_decoder().values()}
        # At the level of bytes a letter of the vocabulary is one byte, whatever its own length.
        is_bytes = isinstance(self._fast.decoder, ByteLevel)
        own = (token for token in self._fast.get_vocab(with_added_tokens=False))
        longest = max((len(token) if is_bytes else len(token.encode()) for token in own), default=1)
        longest = max(longest, *(len(token.encode()) for token in added), 1)
        return longest if self._fast.normalizer is None else longest * MOST_SHRUNK

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; ``special`` adds what the model expects around a plain text."""
        # A batch of one: the library lets other threads run meanwhile only for a batch.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a conversation, up to where the assistant speaks."""
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message], most_bytes: int | None = None) -> str:
        """The text of a conversation's prompt; refuses to write one above ``most_bytes``."""
        parts: list[str] = []
        num_bytes = 0
        try:
            for part in self._template.generate(
                messages=messages,
                add_generation_prompt=True,
                bos_token=_token(self._settings.bos_token),
                eos_token=_token(self._settings.eos_token),
            ):
                parts.append(part)
                num_bytes += len(part.encode(errors="replace"))
                if most_bytes is not None and num_bytes > most_bytes:
                    raise TooLong(f"the conversation has more than {most_bytes} bytes")
        except (TemplateError, TypeError) as error:
            raise InputError(f"the model's chat template refuses this: {error}") from None
        return "".join(parts)

    @cached_property
    def _template(self) -> Template:
        source = self._settings.chat_template
        if not isinstance(source, str):
            raise InputError("this model has no chat template; use plain completions")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(source)


def _settings(folder: Path) -> Settings:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return Settings()
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=Settings)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} can't be read ({error}); download it again") from None
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings.chat_template = template.read_text(encoding="utf-8")
    return settings


def _token(value: object) -> str:
    """A special token, which may be written as its text or as an object with it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
