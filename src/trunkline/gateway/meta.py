"""Paths that describe the server or its tokenizer: models, tokenize, detokenize, health, metrics, cache reset."""

import asyncio
from datetime import UTC, datetime
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.core.types import Ints
from trunkline.gateway.body import BodyDecoder, read_body
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import InvalidRequest, Unavailable
from trunkline.gateway.generate import SCOPE_KEY
from trunkline.gateway.identity import salt_of
from trunkline.gateway.messages import render
from trunkline.gateway.metrics import CONTENT_TYPE
from trunkline.gateway.params import check_model, check_tokens
from trunkline.wire.openai import (
    DetokenizeBody,
    DetokenizeReply,
    Done,
    Health,
    ModelCard,
    ModelList,
    TokenizeBody,
    TokenizeReply,
)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


class Meta:
    """Handlers that share one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokenize_decoder = BodyDecoder("/tokenize")
        self._detokenize_decoder = BodyDecoder("/detokenize")

    def _card(self, name: str) -> ModelCard:
        model = self._gateway.executor.model
        return ModelCard(
            id=name,
            created=model.created,
            max_model_len=model.max_model_len,
            display_name=model.id,
            created_at=datetime.fromtimestamp(model.created, UTC).isoformat(),
            max_input_tokens=model.max_model_len,
        )

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: one model, under each of its names."""
        names = list(dict.fromkeys((self._gateway.executor.model.id, *self._gateway.settings.model_aliases)))
        cards = [self._card(name) for name in names]
        return json_response(ModelList(data=cards, first_id=names[0], last_id=names[-1]))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["id"]
        check_model(name, self._gateway.executor.model, self._gateway.settings)
        return json_response(self._card(name))

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 once generation works, 503 while it does not or the server drains."""
        if self._gateway.flights.draining:
            raise Unavailable("Draining: the server is stopping.", retry_after_s=5)
        self._gateway.check_ready()
        return json_response(Health(self._gateway.executor.model.id))

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        body = self._gateway.metrics.render(self._gateway.records.lost)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`."""
        self._gateway.executor.reset_prefix_cache()
        return json_response(Done())

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        raw = await read_body(request, self._gateway.settings)
        return json_response(await asyncio.to_thread(self._tokenize, raw, request.scope[SCOPE_KEY]))

    def _tokenize(self, raw: bytes, scope: str) -> TokenizeReply:
        executor = self._gateway.executor
        body = self._tokenize_decoder.decode(raw, TokenizeBody)
        check_model(body.model, executor.model, self._gateway.settings)
        tokens = self._tokens(body, salt_of(scope, body.cache_salt)).tolist()
        return TokenizeReply(
            count=len(tokens),
            max_model_len=executor.model.max_model_len,
            tokens=tokens,
            token_strs=[self._gateway.token_text(token) for token in tokens] if body.return_token_strs else None,
        )

    def _tokens(self, body: TokenizeBody, salt: str) -> Ints:
        executor = self._gateway.executor
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
        if body.messages is not None:
            quiet = self._gateway.noise.settle(salt, body.messages, body.tools)
            text = render(
                executor,
                quiet.messages,
                quiet.tools,
                body.chat_template_kwargs,
                body.add_generation_prompt,
                body.continue_final_message,
                partial(self._gateway.calls.recall, salt),
            )
        else:
            assert body.prompt is not None
            text = body.prompt
        return executor.tokenize(text, salt=salt, bos=body.add_special_tokens is not False)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        raw = await read_body(request, self._gateway.settings)
        return json_response(await asyncio.to_thread(self._detokenize, raw))

    def _detokenize(self, raw: bytes) -> DetokenizeReply:
        executor = self._gateway.executor
        body = self._detokenize_decoder.decode(raw, DetokenizeBody)
        check_model(body.model, executor.model, self._gateway.settings)
        check_tokens(body.tokens, executor.model.vocab_size, "tokens")
        return DetokenizeReply(executor.detokenize(body.tokens))
