"""OpenAI's Responses API, as far as it is served: requests in, response objects out.

One struct stands for every kind of item, because items that were sent out come back in, mixed with the client's own.
None means "not given". Kinds and ranges are checked by the gateway.
"""

from typing import Any

import msgspec

from trunkline.wire.openai import GenerationBody


class ItemPart(msgspec.Struct, omit_defaults=True):
    """A part of an item's content: text under one of its names (`input_text`, `output_text`, `reasoning_text`, ...)."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One input item of any type; `type` None means a message. Which fields a type needs, the gateway checks."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class Reasoning(msgspec.Struct, omit_defaults=True):
    """How much to think. `summary` is accepted; the reasoning itself is shown, so nothing needs to sum it up."""

    effort: str | None = None
    summary: str | None = None


class TextConfig(msgspec.Struct):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(GenerationBody, kw_only=True):
    """`POST /v1/responses`. What it shares with chat completions is inherited."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# --- replies -----------------------------------------------------------------------------------------------------


class LogprobAlternative(msgspec.Struct, frozen=True):
    """One alternative of a token."""

    token: str
    bytes: list[int]
    logprob: float


class TextLogprob(msgspec.Struct, frozen=True):
    """One token of the text. `bytes` is empty where the token alone is not whole UTF-8."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LogprobAlternative]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[str] = []
    logprobs: list[TextLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An item of what the model said. `status` is in_progress, completed or incomplete (cut by the token limit)."""

    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """An item of a call that the model asks for; the client's `function_call_output` repeats its `call_id`."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """An item of reasoning. `encrypted_content`, if asked for, carries it through clients that drop `content`."""

    id: str
    summary: list[str] = []
    content: list[ReasoningText]
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: str


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Cached tokens, 0 included. Nothing is written at a price, so `cache_write_tokens` is 0."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of the output that are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed after it began."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response, whole or in the making. What the client asked for is repeated, defaults filled in."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """`DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/responses/{id}/input_items`."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
