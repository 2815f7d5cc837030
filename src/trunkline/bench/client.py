"""One OpenAI-compatible endpoint as the replay driver sees it: streamed generations, timed, and token counts."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec


class EndpointError(RuntimeError):
    """The endpoint cannot be used as asked; the text names what to change."""


@dataclass(slots=True)
class Reply:
    """What one generation gave. Times are milliseconds from sending the request; `error` is None if it ended well.

    `cached_tokens` is None where the server does not report it. `chunk_ms` are the arrivals of text. `retry_after_s` is
    set if the server is too busy for the request and said when to send it again.
    """

    text: str = ""
    ttft_ms: float | None = None
    latency_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish: str = ""
    error: str | None = None
    retry_after_s: float | None = None
    chunk_ms: list[float] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Endpoint:
    """A server at `base_url` (without `/v1`). Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=timeout_s, limits=limits, transport=transport
        )
        self._llama_server: bool | None = None

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> tuple[str, int | None]:
        """The first served model's id, and its context in tokens where the server says so."""
        answer = await self._json("GET", "/v1/models")
        if not answer.get("data"):
            raise EndpointError(f"{self.base_url}/v1/models lists no model; is the server ready?")
        model = answer["data"][0]
        context = model.get("max_model_len") or model.get("meta", {}).get("n_ctx")
        return str(model["id"]), context

    async def generate(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        """Send one streamed request to `/v1/chat/completions` or `/v1/completions` and read it to its end."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reply, began = Reply(), time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body, headers=headers) as response:
                reply.headers = response.headers
                if response.status_code == 200:
                    await _read_stream(response.aiter_lines(), reply, began)
                else:
                    reply.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}"
                    wait = response.headers.get("retry-after", "")
                    if response.status_code == 429 and wait.isdecimal():
                        reply.retry_after_s = float(wait)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.latency_ms = (time.perf_counter() - began) * 1e3
        return reply

    async def tokenize_text(self, text: str) -> list[int]:
        """Token ids of plain text, as the server reads it."""
        if await self._is_llama_server():
            answer = await self._json("POST", "/tokenize", {"content": text, "parse_special": True})
        else:
            answer = await self._json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    async def tokenize_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of the prompt that the server's chat template makes of `messages` and `tools`."""
        chat = {"messages": messages} | ({"tools": tools} if tools else {})
        if await self._is_llama_server():
            prompt = (await self._json("POST", "/apply-template", chat))["prompt"]
            special = {"content": prompt, "add_special": True, "parse_special": True}
            return list((await self._json("POST", "/tokenize", special))["tokens"])
        answer = await self._json("POST", "/tokenize", chat | {"add_generation_prompt": True})
        return list(answer["tokens"])

    async def _is_llama_server(self) -> bool:
        """Whether `/tokenize` speaks llama-server's dialect (`content`) rather than vLLM's (`prompt`, `count`)."""
        if self._llama_server is None:
            response = await self._http.post("/tokenize", json={"content": "a", "prompt": "a"})
            if response.status_code != 200:
                raise EndpointError(f"{self.base_url}/tokenize answers {response.status_code}; token counts need it")
            self._llama_server = "count" not in response.json()
        return self._llama_server

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EndpointError(f"{method} {self.base_url}{path}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EndpointError(f"{method} {self.base_url}{path}: HTTP {response.status_code} {response.text}")
        return dict(response.json())


async def _read_stream(lines: AsyncIterator[str], reply: Reply, began: float) -> None:
    """Read server-sent events into `reply`."""
    parts: list[str] = []
    reply.error = "the stream ended without [DONE]"
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            reply.error = None
            break
        chunk = _decode_chunk(data)
        if chunk.error is not None:
            reply.error = str(chunk.error.get("message", chunk.error))
            break
        if chunk.usage is not None:
            _read_usage(chunk.usage, reply)
        for choice in chunk.choices[:1]:
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                reply.chunk_ms.append((time.perf_counter() - began) * 1e3)
                parts.append(text)
            reply.finish = choice.finish_reason or reply.finish
    reply.text = "".join(parts)
    reply.ttft_ms = reply.chunk_ms[0] if reply.chunk_ms else None


def _read_usage(usage: _Usage, reply: Reply) -> None:
    reply.prompt_tokens, reply.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        reply.cached_tokens = usage.prompt_tokens_details.cached_tokens
