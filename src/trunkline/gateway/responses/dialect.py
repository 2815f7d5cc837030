"""`/v1/responses`: from a body, and the stored responses it goes on from, to a request that can run."""

import time
from collections.abc import Mapping

from trunkline.gateway.body import BodyDecoder
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import InvalidRequest, ItemNotFound, MissingField, PreviousNotFound, Unsupported
from trunkline.gateway.params import MAX_TOKENS, int_in_range
from trunkline.gateway.replies import Asked, encode
from trunkline.gateway.responses.reply import ResponsesReply, new_id
from trunkline.gateway.responses.store import Stored, conversation
from trunkline.gateway.responses.translate import ENCRYPTED, as_items, chat_body, functions
from trunkline.gateway.terms import Ignored, Terms, refuse_choices, willing_turn
from trunkline.wire.openai import ChatBody
from trunkline.wire.responses import Item, ResponseObject, ResponsesBody

TERMS = Terms(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }
)


class ResponsesDialect:
    """Parses Responses requests. Thread-safe."""

    blocking = True

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/responses")
        self._ignored = Ignored("/v1/responses")

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Raises `ApiError`."""
        body = self._decoder.decode(raw, ResponsesBody)
        _refuse(body)
        called = functions(body.tools or ())
        self._ignored.note(called.others)
        given = [self._whole(scope, at, item) for at, item in enumerate(as_items(body.input))]
        earlier = self._earlier(scope, body.previous_response_id)
        with TERMS.speaking([at for at, _ in called.tools]):
            chat = chat_body(body, [*earlier, *given])
            turn = willing_turn(self._gateway, chat, scope, headers)
        store = self._gateway.responses if body.store is not False else None
        if store is not None and not store.keeps:
            store = None

        def keep(response: ResponseObject) -> None:
            if store is not None:
                store.put(scope, Stored(response.id, response.previous_response_id, given, encode(response)))

        begun = _begun(body, chat, self._gateway.executor.model.id, stored=store is not None)
        reply = ResponsesReply(
            begun,
            self._gateway.token_text,
            keep,
            carry_thinking=ENCRYPTED in (body.include or ()),
            namespaces=called.namespaces,
        )
        return turn.asked(reply, stream=bool(body.stream))

    def _whole(self, scope: str, at: int, item: Item) -> Item:
        """`item`, or what it refers to. Raises `ItemNotFound`."""
        if item.type != "item_reference" or item.id is None:
            return item
        found = self._gateway.responses.item(scope, item.id)
        if found is None:
            raise ItemNotFound(item.id, f"input[{at}].id")
        return found

    def _earlier(self, scope: str, previous: str | None) -> list[Item]:
        """The conversation that a request goes on from. Raises `PreviousNotFound`."""
        if not previous:
            return []
        chain = self._gateway.responses.chain(scope, previous)
        if isinstance(chain, str):
            raise PreviousNotFound(previous, chain)
        return conversation(chain)


def _refuse(body: ResponsesBody) -> None:
    """Raise for what cannot be honoured."""
    refuse_choices(body.n)
    refused = (
        ("background", body.background, "the answer comes with the request; stream it if it takes long"),
        ("conversation", body.conversation, "name the response to go on from with `previous_response_id`"),
        ("prompt", body.prompt, "no prompts are kept here; send the text in `instructions` and `input`"),
    )
    for field, value, instead in refused:
        if value:
            raise Unsupported(f"`{field}` is not supported: {instead}.", param=field)
    if body.max_tokens is not None:
        raise InvalidRequest("max_tokens is called max_output_tokens in this API; send that.", param="max_tokens")
    int_in_range("max_output_tokens", body.max_output_tokens, 1, 1, MAX_TOKENS)
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(
            f'truncation must be "auto" or "disabled", not {body.truncation[:64]!r}.', param="truncation"
        )
    if body.input is None and not body.previous_response_id:
        raise MissingField("`input` is required.", param="input")


def _begun(body: ResponsesBody, chat: ChatBody, model: str, *, stored: bool) -> ResponseObject:
    """The response in progress: what was asked for, defaults filled in."""
    wanted = body.text.format if body.text is not None else None
    return ResponseObject(
        id=new_id(),
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id or None,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning,
        safety_identifier=body.safety_identifier,
        store=stored,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": wanted or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=chat.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation="disabled",
        user=body.user,
    )
