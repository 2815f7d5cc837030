"""An OpenAI-compatible server that generates nothing real: it counts words, remembers prompts, and keeps a log."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """One word is one token. A prompt's cached tokens are its longest prefix seen before, less the last token.

    `dialect` is whose `/tokenize` it speaks: "vllm" or "llama". `fail_at` refuses the requests of those numbers,
    `busy_at` tells them to come back at once.
    """

    def __init__(self, dialect: str = "vllm", fail_at: tuple[int, ...] = (), reports_cache: bool = True) -> None:
        self.busy_at: tuple[int, ...] = ()
        self.dialect, self.fail_at, self.reports_cache = dialect, fail_at, reports_cache
        self.log: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self._held: list[list[int]] = []
        routes = [
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/apply-template", self._template, methods=["POST"]),
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/v1/completions", self._generate, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if self.dialect == "llama":
            return JSONResponse({"tokens": words(body.get("content", ""))})
        tokens = chat(body["messages"]) if "messages" in body else words(body["prompt"])
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _template(self, request: Request) -> Response:
        return JSONResponse({"prompt": render((await request.json())["messages"])})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.log)
        tokens = chat(body["messages"]) if "messages" in body else body["prompt"]
        self.log.append({**body, "path": request.url.path, "headers": dict(request.headers), "tokens": tokens})
        if number in self.busy_at:
            return JSONResponse({"error": {"message": "busy"}}, status_code=429, headers={"Retry-After": "0"})
        if number in self.fail_at:
            return JSONResponse({"error": {"message": "too long"}}, status_code=400)
        cached = max((common(tokens, held) for held in self._held), default=0)
        self._held.append(tokens)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": body["max_tokens"]}
        if self.reports_cache:
            usage["prompt_tokens_details"] = {"cached_tokens": min(cached, len(tokens) - 1)}
        return StreamingResponse(self._stream(number, body, usage), media_type="text/event-stream")

    async def _stream(self, number: int, body: dict[str, Any], usage: dict[str, Any]) -> AsyncIterator[str]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        for i in range(body["max_tokens"]):
            text = f"live{number}.{i} "
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            yield event({"choices": [{"index": 0, **choice}]})
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
        self.open -= 1


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def words(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def render(messages: list[dict[str, str]]) -> str:
    return " ".join(f"<{m['role']}> {m['content']} <end>" for m in messages) + " <assistant>"


def chat(messages: list[dict[str, str]]) -> list[int]:
    return words(render(messages))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
