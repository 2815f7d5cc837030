"""`/v1/messages` and `/v1/messages/count_tokens`."""

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from trunkline.gateway.anthropic.reply import MessagesReply
from trunkline.gateway.anthropic.translate import chat_body, client_tools
from trunkline.gateway.body import BodyDecoder, read_body
from trunkline.gateway.chat import ChatTurn
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import ContextOverflow
from trunkline.gateway.generate import SCOPE_KEY
from trunkline.gateway.meta import json_response
from trunkline.gateway.replies import Asked
from trunkline.gateway.terms import Ignored, Terms, refuse_choices, willing_turn
from trunkline.wire.anthropic import CountTokensBody, MessagesBody, TokenCount

TERMS = Terms(
    {
        "messages": "messages",
        "stop": "stop_sequences",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
    },
    schema="input_schema",
)


class MessagesDialect:
    """Parses Messages requests. Thread-safe."""

    blocking = False

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/messages")
        self._counted = BodyDecoder("/v1/messages/count_tokens")
        self._ignored = Ignored("/v1/messages")

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Raises `ApiError`.

        `max_tokens` has no default in this API, so that clients send what their own models can: beyond the context it
        means the rest of the context.
        """
        body = self._decoder.decode(raw, MessagesBody)
        turn = self._turn(body, scope, headers)
        reply = MessagesReply(self._gateway.executor.model.id, clipped=turn.prompt.max_tokens < body.max_tokens)
        return turn.asked(reply, stream=bool(body.stream))

    def _turn(self, body: CountTokensBody, scope: str, headers: Mapping[str, str]) -> ChatTurn:
        refuse_choices(body.n)
        own, others = client_tools(body.tools or ())
        self._ignored.note(others)
        chat = chat_body(body)
        with TERMS.speaking([at for at, _ in own]):
            return willing_turn(self._gateway, chat, scope, headers)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`: the tokens of the prompt that the same request would have."""
        self._gateway.check_ready()
        raw = await read_body(request, self._gateway.settings)
        scope: str = request.scope[SCOPE_KEY]
        return json_response(await asyncio.to_thread(self._count, raw, scope, request.headers))

    def _count(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> TokenCount:
        body = self._counted.decode(raw, CountTokensBody)
        try:
            return TokenCount(len(self._turn(body, scope, headers).prompt.tokens))
        except ContextOverflow as overflow:  # a prompt that is too long is what clients count for
            return TokenCount(overflow.prompt_tokens)
