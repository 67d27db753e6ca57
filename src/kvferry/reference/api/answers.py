"""Answers in the form of OpenAI's API, whole or piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.reference.engine.requests import Produced, Sample
from kvferry.reference.models.tokenizer import Tokenizer
from kvferry.reference.worker.jobs import ServeJob

Document = dict[str, Any]


class AnswerWriter:
    """Writes one completion; its tokens come in order, each once."""

    NAME = CHUNK_NAME = "text_completion"

    def __init__(self, job: ServeJob, model: str, tokenizer: Tokenizer, created: int) -> None:
        self._job = job
        self._ask = ask = job.ask
        self._tokenizer = tokenizer
        self._head: Document = {"id": ask.request.id, "created": created, "model": model}
        self._num_tokens = 0
        self._offset = 0

    def whole(self, pieces: Sequence[Produced]) -> Document:
        """Return the whole answer."""
        self._num_tokens = len(pieces)
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(text) | self._common(pieces)
        answer = {**self._head, "object": self.NAME, "choices": [choice], "usage": self._usage()}
        return answer | self._kvferry()

    def chunks(self, piece: Produced) -> list[Document]:
        """Return what a piece adds to a stream; empty if there is nothing to show yet."""
        documents = self._opening() if self._num_tokens == 0 else []
        self._num_tokens += 1
        if piece.text or piece.finish or self._ask.logprobs or self._ask.token_ids:
            documents.append(self._chunk([self._part(piece.text) | self._common([piece])]))
        if piece.finish:
            if self._ask.usage:
                documents.append(self._chunk([]) | {"usage": self._usage()})
            documents[-1] |= self._kvferry()
        return documents

    def _chunk(self, choices: list[Document]) -> Document:
        usage = {"usage": None} if self._ask.usage else {}
        return {**self._head, "object": self.CHUNK_NAME, "choices": choices, **usage}

    def _usage(self) -> Document:
        num_prompt = len(self._ask.request.prompt)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _kvferry(self) -> Document:
        if self._job.report is None:
            return {}
        report = msgspec.to_builtins(self._job.report)
        return {"kvferry": {name: value for name, value in report.items() if value is not None}}

    def _common(self, pieces: Sequence[Produced]) -> Document:
        """Return the fields that choices of both kinds of answers have."""
        samples = [piece.sample for piece in pieces]
        fields: Document = {
            "index": 0,
            "finish_reason": pieces[-1].finish,
            "logprobs": self._logprobs(samples) if self._ask.logprobs else None,
        }
        if self._ask.token_ids:
            fields["token_ids"] = [sample.token for sample in samples]
        return fields

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def _opening(self) -> list[Document]:
        return []

    def _choice(self, text: str) -> Document:
        return {"text": text}

    def _part(self, text: str) -> Document:
        return self._choice(text)

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


class ChatWriter(AnswerWriter):
    """Writes one answer of a conversation."""

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
