"""The tokenizer of a model folder: text to tokens and back, and conversations to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from kvferry import InputError, decode_config


class TokenizerSettings(msgspec.Struct):
    """The fields of ``tokenizer_config.json`` that are used."""

    chat_template: object = None
    bos_token: object = ""
    eos_token: object = ""


class Tokenizer:
    """A model's tokenizer and its chat template."""

    def __init__(self, fast: FastTokenizer, settings: TokenizerSettings) -> None:
        self._fast = fast
        self._settings = settings

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` and the files beside it."""
        path = folder / "tokenizer.json"
        try:
            # The library has no error class of its own.
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            message = f"{path} can't be read ({error}); give the folder of a whole model"
            raise InputError(message) from None
        path = folder / "tokenizer_config.json"
        settings = decode_config(path, TokenizerSettings) if path.is_file() else TokenizerSettings()
        return Tokenizer(fast, settings)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids; ``special`` adds what the model expects around a plain text."""
        # A batch of one, because the library releases the GIL only for batches.
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, without special ones."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the prompt of a conversation, up to the assistant's turn."""
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self._settings.bos_token,
                eos_token=self._settings.eos_token,
            )
        except (TemplateError, TypeError) as error:
            raise InputError(f"the model's chat template refuses this: {error}") from None
        return self.encode(text, special=False)

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


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
