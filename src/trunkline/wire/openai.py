"""OpenAI's HTTP schemas, as far as they are served: requests in, replies out.

Requests list every field that changes an answer; anything else a client sends is accepted and ignored. None means "not
given" everywhere, so that an explicit `null` and an absent field are the same. Ranges are checked by the gateway.
"""

from typing import Any

import msgspec


class ContentPart(msgspec.Struct):
    """One part of a message's content; only `text` parts are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One chat message. `reasoning` is another name of `reasoning_content`; `function_call` is refused."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    """`include_usage` asks for a last chunk with the usage, `continuous_usage_stats` for it in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both generation endpoints take."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A prompt is text or token ids; a list of either is a batch."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: `prompt` or `messages`, as vLLM takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    cache_salt: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class DeclareRunBody(msgspec.Struct, kw_only=True):
    """`POST /v1/runs`. `id` None: one is made.

    `objective`, `expected_turns` and `expected_tokens` (of context at the end) are what the client predicts. `class` is
    `interactive` or `batch`.
    """

    id: str | None = None
    name: str | None = None
    parent: str | None = None
    objective: str | None = None
    expected_turns: int | None = None
    expected_tokens: int | None = None
    service: str | None = msgspec.field(default=None, name="class")
    cache_salt: str | None = None


# --- replies -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Always sent, 0 included."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request: the prompt once, the completions of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative. `bytes` is None where the token alone is not whole UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One chosen token and its alternatives, best first."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of one chat choice, an entry a token."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of one completion choice, parallel lists with an entry a token. None: nothing predicts it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(msgspec.Struct, frozen=True):
    """Which function, with what: `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that the model asks for."""

    id: str
    type: str = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said. `content` is None where it only called. `reasoning` repeats `reasoning_content`, whose
    newer name it is.
    """

    role: str = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call: its name at first, then more and more of its arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of call `index`. Its first piece has the id, the type and the name."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a message."""

    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole reply of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole reply of `/v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model, with vLLM's `max_model_len`; the last four fields are Anthropic's (`created_at` in RFC 3339)."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "trunkline"
    max_model_len: int
    type: str = "model"
    display_name: str
    created_at: str
    max_input_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`. `token_strs` only if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    prompt: str


class Health(msgspec.Struct, frozen=True):
    """`GET /health`, once generation works."""

    model: str
    status: str = "ok"


class Done(msgspec.Struct, frozen=True):
    """What there is nothing more to say of."""

    status: str = "ok"


class OpenApi(msgspec.Struct, frozen=True):
    """`GET /openapi.json`, as far as it describes itself."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong and, where one field did it, which."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every 4xx and 5xx."""

    error: ErrorDetail
