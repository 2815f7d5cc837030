"""From a Messages request to a chat request: pure functions over bodies and blocks.

system                       one system message
user: text                   one user message; neighbours become one, as Anthropic's own server does
user: tool_result            one tool message each, before the text of the same message
assistant: thinking, text,   one assistant message
  tool_use
a last assistant message     the beginning of the answer, which the model goes on with
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from trunkline.gateway.errors import InvalidRequest, MissingField, Unsupported
from trunkline.gateway.terms import with_effort
from trunkline.wire.anthropic import Block, CountTokensBody, InputMessage, MessagesBody, Tool, ToolChoice
from trunkline.wire.openai import ChatBody, ContentPart, GenerationBody, Message

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OWN_TOOL = frozenset({None, "custom"})
SHARED = frozenset(GenerationBody.__struct_fields__)
DROPPED = frozenset({"redacted_thinking"})
"""Blocks of other servers that only they can read."""

encode = msgspec.json.Encoder(decimal_format="number").encode


def chat_body(body: CountTokensBody) -> ChatBody:
    """The chat request that says the same. Raises `InvalidRequest` or one of its kinds."""
    shared = {name: getattr(body, name) for name in SHARED}
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        shared["stop"] = body.stop_sequences
    tools, _ = client_tools(body.tools or ())
    conversation = messages(body.system, body.messages)
    last = conversation[-1] if conversation else None
    continues = last is not None and last.role == "assistant" and not last.tool_calls
    return ChatBody(
        **shared,
        messages=conversation,
        tools=[_function(at, tool) for at, tool in tools] or None,
        tool_choice=tool_choice(body.tool_choice, tools),
        parallel_tool_calls=_parallel(body.tool_choice) if tools else None,
        response_format=response_format(body),
        chat_template_kwargs=template_kwargs(body),
        add_generation_prompt=False if continues else None,
        continue_final_message=True if continues else None,
    )


def messages(system: str | list[Block] | None, given: Sequence[InputMessage]) -> list[Message]:
    """The conversation as chat messages."""
    if not given:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    made: list[Message] = []
    if system:
        made.append(Message(role="system", content=_texts("system", system)))
    for at, message in enumerate(given):
        where = f"messages[{at}]"
        match message.role:
            case "user" | "system":
                _add_user(made, where, message)
            case "assistant":
                _add_assistant(made, where, message)
            case other:
                raise InvalidRequest(
                    f"{where}.role must be user, assistant or system, not {other[:64]!r}.", param=f"{where}.role"
                )
    return made


def _add_user(made: list[Message], where: str, message: InputMessage) -> None:
    """A user's (or the system's) message: first what its tools said, then its text."""
    text: list[ContentPart] = []
    if isinstance(message.content, str):
        text.append(ContentPart("text", message.content))
    else:
        for at, block in enumerate(message.content):
            place = f"{where}.content[{at}]"
            if block.type == "tool_result":
                call = _required(place, "tool_use_id", block.tool_use_id)
                said = _texts(f"{place}.content", block.content or "")
                made.append(Message(role="tool", content=said, tool_call_id=call))
            else:
                text.append(ContentPart("text", _text(place, block)))
        if not text and message.content:
            return
    last = made[-1] if made else None
    if last is not None and last.role == message.role and isinstance(last.content, list):
        last.content += text
    else:
        made.append(Message(role=message.role, content=text))


def _add_assistant(made: list[Message], where: str, message: InputMessage) -> None:
    if not made or made[-1].role != "assistant":
        made.append(Message(role="assistant"))
    turn = made[-1]
    blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for at, block in enumerate(blocks):
        place = f"{where}.content[{at}]"
        if block.type == "thinking":
            turn.reasoning_content = (turn.reasoning_content or "") + _required(place, "thinking", block.thinking)
        elif block.type == "tool_use":
            turn.tool_calls = [*(turn.tool_calls or ()), _call(place, block)]
        elif block.type not in DROPPED:
            # The blocks of one generation are one text: what was generated, not a line each.
            assert turn.content is None or isinstance(turn.content, str)
            turn.content = (turn.content or "") + _text(place, block)


def _call(where: str, block: Block) -> dict[str, Any]:
    name, call = _required(where, "name", block.name), _required(where, "id", block.id)
    if not isinstance(block.input, dict):
        raise InvalidRequest(f"{where}.input must be an object.", param=f"{where}.input")
    return {"id": call, "type": "function", "function": {"name": name, "arguments": encode(block.input).decode()}}


def _texts(where: str, content: str | list[Block]) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    return [ContentPart("text", _text(f"{where}[{at}]", block)) for at, block in enumerate(content)]


def _text(where: str, block: Block) -> str:
    """The text of a block that is text, also of a plain-text document."""
    match block:
        case Block(type="text"):
            return _required(where, "text", block.text)
        case Block(type="document", source={"type": "text", "data": str() as data}):
            return data
    raise Unsupported(
        f"`{where}` is of type {block.type[:64]!r}, which is not supported here: this model reads only text.",
        param=where,
    )


def _required(where: str, name: str, value: str | None) -> str:
    if value is None:
        raise MissingField(f"`{where}.{name}` is required.", param=f"{where}.{name}")
    return value


Tools = list[tuple[int, Tool]]


def client_tools(tools: Sequence[Tool]) -> tuple[Tools, list[str]]:
    """(the tools that the client runs, with their places; the types of all others, which Anthropic's servers run)."""
    own = [(at, tool) for at, tool in enumerate(tools) if tool.type in OWN_TOOL]
    return own, [tool.type[:64] for tool in tools if tool.type is not None and tool.type not in OWN_TOOL]


def _function(at: int, tool: Tool) -> dict[str, Any]:
    if tool.input_schema is None:
        raise MissingField(f"`tools[{at}].input_schema` is required.", param=f"tools[{at}].input_schema")
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def tool_choice(choice: ToolChoice | None, tools: Tools) -> str | dict[str, Any] | None:
    """`tool_choice` in chat completions' words."""
    if choice is None:
        return None
    if choice.type == "tool":
        name = _required("tool_choice", "name", choice.name)
        if all(tool.name != name for _, tool in tools):
            raise InvalidRequest(
                f"tool_choice names {name[:64]!r}, which is none of the tools that the client runs.",
                param="tool_choice.name",
            )
        return {"type": "function", "function": {"name": name}}
    if choice.type not in CHOICES:
        raise InvalidRequest(
            f"tool_choice.type must be auto, any, tool or none, not {choice.type[:64]!r}.", param="tool_choice.type"
        )
    if choice.type == "any" and not tools:
        raise InvalidRequest('tool_choice "any" needs a tool that the client runs in `tools`.', param="tool_choice")
    return CHOICES[choice.type] if tools else None


def _parallel(choice: ToolChoice | None) -> bool | None:
    return None if choice is None or choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use


def response_format(body: CountTokensBody) -> dict[str, Any] | None:
    """`output_config.format` in chat completions' form."""
    wanted = body.output_config.format if body.output_config is not None else None
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequest(
            'output_config.format must be {"type": "json_schema", "schema": {...}}.', param="output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"], "strict": True}}


def template_kwargs(body: CountTokensBody) -> dict[str, Any] | None:
    """The client's own template variables, and whether and how much to think under the names that templates know."""
    given = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        given.setdefault("enable_thinking", body.thinking.type != "disabled")
    effort = body.output_config.effort if body.output_config is not None else None
    return with_effort(given, effort) or None
