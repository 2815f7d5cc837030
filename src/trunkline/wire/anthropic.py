"""Anthropic's Messages API, as far as it is served: requests in, messages out.

One struct stands for every kind of content block; which fields a kind needs, the gateway checks. None means "not
given". `cache_control` may stand anywhere and is ignored: every prefix is cached, marked or not.
"""

from typing import Any

import msgspec

from trunkline.wire.openai import GenerationBody


class Block(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One content block of a request, of any type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    source: dict[str, Any] | None = None


class InputMessage(msgspec.Struct):
    """One message: `user`, `assistant`, or (newer clients) `system`."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One tool. `type` None or `custom`: the client runs it; any other is one that Anthropic's servers would run."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """`auto`, `any`, `tool` (with `name`) or `none`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether to think. `budget_tokens` is accepted; nothing enforces it but `max_tokens`."""

    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    """How much effort, and the form of the answer's text."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensBody(GenerationBody, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt. What it shares with chat completions is inherited."""

    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None


# --- replies -----------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. Clients drop blocks without a `signature`, so there is one: a digest of the text, never checked."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model asks for; the client's `tool_result` repeats its `id`."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Tokens of the output that are reasoning."""

    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one message. `input_tokens` are those that no cache held: the prompt is the sum of all three."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens = ThinkingTokens()


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """One message, whole or (in `message_start`) about to begin."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: Anthropic's `type` and `message`, with the `param` and `code` of OpenAI's shape."""

    type: str
    message: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Every 4xx and 5xx under `/v1/messages`."""

    error: ErrorDetail
