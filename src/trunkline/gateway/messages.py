"""Chat messages: from the wire to what a model's template renders."""

from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.gateway.errors import InvalidRequest, MissingField, TemplateRefused, Unsupported
from trunkline.gateway.executor import Executor, TemplateError
from trunkline.wire.openai import ContentPart, Message

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


def render(
    executor: Executor,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
) -> str:
    """The prompt text of a chat. Raises `InvalidRequest` or one of its kinds.

    The last two are vLLM's: whether the prompt ends where the model's next message begins (it does unless told), or
    inside the last message, for the model to go on with.
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
    if tools:
        options["tools"] = list(tools)
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    if continue_final_message is not None:
        options["continue_final_message"] = continue_final_message
    try:
        return executor.render_chat([_for_template(at, message) for at, message in enumerate(messages)], options)
    except TemplateError as error:
        raise TemplateRefused(f"The model's chat template refused the messages: {error}.", param="messages") from None
    except RecursionError:
        raise TemplateRefused("The messages or tools are nested too deeply; flatten them.", param="messages") from None


def _for_template(at: int, message: Message) -> dict[str, Any]:
    where = f"messages[{at}]"
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, not {message.role[:64]!r}.", param=f"{where}.role"
        )
    rendered: dict[str, Any] = {"role": role, "content": _text(where, message)}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
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
