"""Answers as OpenAI's clients read them, whole or piece by piece. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.reference.api.bodies import Ask
from kvferry.reference.engine.steps import Sample
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.worker.jobs import AnswerPiece, TransferAccount

Document = dict[str, Any]


class Writer(ABC):
    """Writes one answer. Pieces come in their order, each once."""

    NAME = ""
    CHUNK_NAME = ""

    def __init__(self, ask: Ask, model: str, tokenizer: Tokenizer, created: int) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._head: Document = {"id": ask.request.id, "created": created, "model": model}
        self._num_tokens = 0
        self._report: TransferAccount | None = None

    def whole(self, pieces: Sequence[AnswerPiece]) -> Document:
        """The answer at once."""
        self._count(pieces)
        last = pieces[-1]
        choice = self._choice("".join(piece.text for piece in pieces))
        choice |= {"index": 0, "finish_reason": str(last.finish)} | self._extras(pieces)
        answer = {**self._head, "object": self.NAME, "choices": [choice], "usage": self._usage()}
        return answer | self._kvferry()

    def chunks(self, piece: AnswerPiece) -> list[Document]:
        """What a piece adds to a stream; nothing where there is nothing to show yet."""
        is_first = self._num_tokens == 0
        self._count([piece])
        documents = self._opening() if is_first else []
        wordy = self._ask.logprobs or self._ask.token_ids
        if piece.text or piece.finish or wordy:
            documents.append(self._chunk([self._delta(piece)]))
        if piece.finish:
            documents += self._ending()
            documents[-1] |= self._kvferry()
        return documents

    def _delta(self, piece: AnswerPiece) -> Document:
        finish = None if piece.finish is None else str(piece.finish)
        choice = self._part(piece.text) | {"index": 0, "finish_reason": finish}
        return choice | self._extras([piece])

    def _ending(self) -> list[Document]:
        return [self._chunk([]) | {"usage": self._usage()}] if self._ask.usage else []

    def _chunk(self, choices: list[Document]) -> Document:
        usage = {"usage": None} if self._ask.usage else {}
        return {**self._head, "object": self.CHUNK_NAME, "choices": choices, **usage}

    def _count(self, pieces: Sequence[AnswerPiece]) -> None:
        self._num_tokens += len(pieces)
        self._report = pieces[-1].report or self._report

    def _usage(self) -> Document:
        num_prompt = len(self._ask.request.prompt)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _kvferry(self) -> Document:
        if self._report is None:
            return {}
        told = msgspec.to_builtins(self._report)
        return {"kvferry": {name: value for name, value in told.items() if value is not None}}

    def _extras(self, pieces: Sequence[AnswerPiece]) -> Document:
        samples = [piece.sample for piece in pieces]
        extras: Document = {"logprobs": self._logprobs(samples) if self._ask.logprobs else None}
        if self._ask.token_ids:
            extras["token_ids"] = [sample.token for sample in samples]
        return extras

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _opening(self) -> list[Document]:
        return []

    @abstractmethod
    def _choice(self, text: str) -> Document:
        """The text of a whole answer."""

    @abstractmethod
    def _part(self, text: str) -> Document:
        """The text of a chunk."""

    @abstractmethod
    def _logprobs(self, samples: Sequence[Sample]) -> Document:
        """What the model thought of these tokens and of others in their place."""


class CompletionWriter(Writer):
    """``/v1/completions``."""

    NAME = CHUNK_NAME = "text_completion"

    def __init__(self, ask: Ask, model: str, tokenizer: Tokenizer, created: int) -> None:
        super().__init__(ask, model, tokenizer, created)
        self._offset = 0

    def _choice(self, text: str) -> Document:
        return {"text": text}

    def _part(self, text: str) -> Document:
        return {"text": text}

    def _logprobs(self, samples: Sequence[Sample]) -> Document:
        texts = [self._text_of(sample.token) for sample in samples]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [sample.logprob for sample in samples],
            "top_logprobs": [
                {self._text_of(token): logprob for token, logprob in sample.top}
                for sample in samples
            ],
            "text_offset": offsets,
        }


class ChatWriter(Writer):
    """``/v1/chat/completions``."""

    NAME, CHUNK_NAME = "chat.completion", "chat.completion.chunk"

    def _opening(self) -> list[Document]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([choice])]

    def _choice(self, text: str) -> Document:
        return {"message": {"role": "assistant", "content": text}}

    def _part(self, text: str) -> Document:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, samples: Sequence[Sample]) -> Document:
        return {
            "content": [
                self._entry(sample.token, sample.logprob)
                | {"top_logprobs": [self._entry(*pair) for pair in sample.top]}
                for sample in samples
            ]
        }

    def _entry(self, token: int, logprob: float | None) -> Document:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def writer_for(ask: Ask, model: str, tokenizer: Tokenizer, created: int) -> Writer:
    """Whatever the question's form asks for."""
    kind = ChatWriter if ask.chat else CompletionWriter
    return kind(ask, model, tokenizer, created)
