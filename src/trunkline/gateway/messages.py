"""Chat messages: from the wire to what a model's template renders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trunkline.gateway.errors import InvalidRequest, MissingField, TemplateRefused, Unsupported
from trunkline.gateway.executor import Executor, TemplateError
from trunkline.gateway.tools.generic import SYSTEM_ROLES, as_text
from trunkline.gateway.tools.history import Past, call_id, sent_calls
from trunkline.gateway.tools.memory import Said
from trunkline.wire.openai import ContentPart, Message
from trunkline.wire.turns import CallFormat

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Recall = Callable[[Message], Said | None]
"""What is known of a message that repeats what a turn said (`CallMemory.recall`)."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)
"""Template variables that are not the client's to set through `chat_template_kwargs`."""


def _nothing(message: Message) -> None:
    """Recalls nothing."""


def render(
    executor: Executor,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    recall: Recall = _nothing,
) -> str:
    """The prompt text of a chat. Raises `InvalidRequest` or one of its kinds.

    The last two are vLLM's: whether the prompt ends where the model's next message begins (it does unless told), or
    inside the last message, for the model to go on with. What `recall` knows of a message is rendered as it was said.
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    options = dict(template_kwargs or {})
    reserved = RESERVED_OPTIONS.intersection(options)
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs must not set {sorted(reserved)}; they are the server's.",
            param="chat_template_kwargs",
        )
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    if continue_final_message is not None:
        options["continue_final_message"] = continue_final_message
    form = executor.model.traits.calls
    sent = [_for_template(at, message, form) for at, message in enumerate(messages)]
    past = Past(form)
    known = [_recalled(past, message, plain, recall) for message, plain in zip(messages, sent, strict=True)]
    try:
        text = _restored(executor, known, tools, options, past) if past else None
        return _rendered(executor, sent, tools, options) if text is None else text
    except TemplateError as error:
        raise TemplateRefused(f"The model's chat template refused the messages: {error}.", param="messages") from None
    except RecursionError:
        raise TemplateRefused("The messages or tools are nested too deeply; flatten them.", param="messages") from None


def _recalled(past: Past, message: Message, plain: dict[str, Any], recall: Recall) -> dict[str, Any]:
    said = recall(message) if message.role == "assistant" and message.tool_calls else None
    return plain if said is None else past.stand_in(plain, said)


def _restored(
    executor: Executor, messages: Messages, tools: Tools, options: Mapping[str, Any], past: Past
) -> str | None:
    """The prompt with what earlier turns really said; None if the template does not take it."""
    try:
        return past.restored(_rendered(executor, messages, tools, options))
    except TemplateError:
        return None


def _rendered(executor: Executor, messages: Messages, tools: Tools, options: Mapping[str, Any]) -> str:
    """The template's text. A template that knows no tools gets them, and all about them, as text."""
    if executor.model.traits.calls is not CallFormat.GENERIC:
        return executor.render_chat(messages, {**options, "tools": list(tools)} if tools else options)
    try:
        return executor.render_chat(as_text(messages, tools), options)
    except TemplateError:
        if not tools or any(message["role"] in SYSTEM_ROLES for message in messages):
            raise
    return executor.render_chat(as_text(messages, tools, system_role=False), options)


def _for_template(at: int, message: Message, form: CallFormat) -> dict[str, Any]:
    where = f"messages[{at}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, not {message.role[:64]!r}.", param=f"{where}.role"
        )
    if message.function_call is not None:
        raise Unsupported(
            f"`{where}.function_call` is not supported: send it as `tool_calls`.", param=f"{where}.function_call"
        )
    if message.role == "tool" and message.tool_call_id is None:
        raise MissingField(f"`{where}.tool_call_id` is required.", param=f"{where}.tool_call_id")
    rendered: dict[str, Any] = {"role": role, "content": _text(where, message)}
    if message.name is not None:
        rendered["name"] = message.name
    if role == "assistant" and message.tool_calls:
        rendered["tool_calls"] = sent_calls(where, message, form)
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = call_id(message.tool_call_id, form)
    thinking = message.reasoning_content or message.reasoning
    if thinking:
        rendered["reasoning_content"] = thinking
    return rendered


def _text(where: str, message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":  # an answer that was only tool calls
            return ""
        raise MissingField(f"`{where}.content` is required.", param=f"{where}.content")
    return "\n".join(_part_text(f"{where}.content[{at}]", part) for at, part in enumerate(content))


def _part_text(where: str, part: ContentPart) -> str:
    if part.type != "text":
        raise Unsupported(
            f"`{where}` is of type {part.type[:64]!r}, which is not supported: this model reads only text parts.",
            param=where,
        )
    if part.text is None:
        raise MissingField(f"`{where}.text` is required.", param=f"{where}.text")
    return part.text
