"""A small server with OpenAI's API and scripted answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from sites import serve_app

from kvferry.cli.eval.problems import INSTRUCTION

MODEL = "examinee"
PATIENCE_S = 30.0
Body = dict[str, Any]
# The text of an answer, or a whole response.
Said = str | web.StreamResponse
Answer = Callable[["Server", str, web.Request], Awaitable[Said]]


def question_in(body: Body) -> str:
    """Return the question of a request, without the shots."""
    if "messages" in body:
        content: str = body["messages"][-1]["content"]
        return content.removesuffix(INSTRUCTION).strip()
    prompt: str = body["prompt"]
    return prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")


class Server:
    """Answers by ``answer`` and records its requests."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.under_way = self.most_under_way = 0
        self.url = ""
        self._answer = answer

    @property
    def asked(self) -> list[str]:
        """The questions, without that of the first, uncounted request."""
        return [question_in(body) for body in self.bodies[1:]]

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}, {"id": "other"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        if body["model"] != MODEL:
            return refusal(404, f"The model {body['model']!r} does not exist")
        if body["max_tokens"] == 1:
            return await streamed(request, "x", "length")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            said = await self._answer(self, question_in(body), request)
        finally:
            self.under_way -= 1
        return await streamed(request, said) if isinstance(said, str) else said


def refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "t", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


async def streamed(request: web.Request, text: str, finish: str = "stop") -> web.StreamResponse:
    """Stream a text word by word, with a token for each word and a final usage."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    words = text.split(" ")
    for i, word in enumerate(words):
        piece = word if i == 0 else f" {word}"
        is_chat = request.path.endswith("/chat/completions")
        choice: Body = {"index": 0, "finish_reason": finish if i == len(words) - 1 else None}
        choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
        await _event(response, {"choices": [choice]})
    usage = {"prompt_tokens": 5, "completion_tokens": len(words)}
    await _event(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _event(response: web.StreamResponse, document: Body) -> None:
    await response.write(f"data: {json.dumps(document)}\n\n".encode())


@contextmanager
def answering(answer: Answer) -> Iterator[Server]:
    """Run a server in a thread."""
    server = Server(answer)
    with serve_app(server.application(), shutdown_s=0.1) as server.url:
        yield server
