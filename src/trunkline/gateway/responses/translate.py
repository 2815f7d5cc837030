"""From a Responses request to a chat request: pure functions over bodies and items.

reasoning, message (assistant), function_call ...   one assistant message: the items of one generation
function_call_output                                one tool message
instructions, leading system/developer messages     one system message
neighbouring user messages                          one user message (many templates want roles to alternate)
"""

import base64
import binascii
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trunkline.gateway.errors import InvalidRequest, MissingField, Unsupported
from trunkline.gateway.terms import with_effort
from trunkline.wire.openai import ChatBody, ContentPart, GenerationBody, Message
from trunkline.wire.responses import Item, ItemPart, ResponsesBody

CARRIED = "trunkline.1."
"""What our `encrypted_content` begins with."""

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
HEADS = frozenset({"system", "developer"})
ROLES = HEADS | {"user", "assistant"}
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

SHARED = frozenset(GenerationBody.__struct_fields__)


def carry(thinking: str) -> str:
    """Reasoning as `encrypted_content`: some clients return nothing else of it. It is encoded, not secret."""
    return CARRIED + base64.urlsafe_b64encode(thinking.encode()).decode()


def carried(encrypted_content: str | None) -> str:
    """What `carry` was given; "" for what another server made, which nobody here can read."""
    if encrypted_content is None or not encrypted_content.startswith(CARRIED):
        return ""
    try:
        return base64.b64decode(encrypted_content.removeprefix(CARRIED), b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def chat_body(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The chat request that says the same. `items` is the whole conversation.

    Raises `InvalidRequest` or one of its kinds.
    """
    shared = {name: getattr(body, name) for name in SHARED}
    tools = functions(body.tools or ()).tools
    choice = tool_choice(body.tool_choice)
    logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return ChatBody(
        **shared,
        messages=messages(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=[{"type": "function", "function": _without_type(tool)} for _, tool in tools] or None,
        tool_choice=choice if tools or choice not in ("auto", "none") else None,
        parallel_tool_calls=body.parallel_tool_calls if tools else None,
        response_format=response_format(body),
        chat_template_kwargs=template_kwargs(body),
    )


def messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """The conversation as chat messages."""
    made: list[Message] = []
    if instructions:
        made.append(Message(role="system", content=[ContentPart("text", instructions)]))
    for at, item in enumerate(items):
        _add(made, f"input[{at}]", item)
    return made


def _add(made: list[Message], where: str, item: Item) -> None:
    match item.type or "message":
        case "message":
            _add_message(made, where, item)
        case "reasoning":
            _add_reasoning(made, item)
        case "function_call":
            call = {
                "id": _required(where, "call_id", item.call_id),
                "type": "function",
                "function": {
                    "name": full_name(item.namespace, _required(where, "name", item.name)),
                    "arguments": _required(where, "arguments", item.arguments),
                },
            }
            turn = _assistant(made)
            turn.tool_calls = [*(turn.tool_calls or ()), call]
        case "function_call_output":
            if item.output is None:
                raise MissingField(f"`{where}.output` is required.", param=f"{where}.output")
            call_id = _required(where, "call_id", item.call_id)
            made.append(Message(role="tool", content=_content(f"{where}.output", item.output), tool_call_id=call_id))
        case other:
            raise Unsupported(
                f"`{where}` is of type {other[:64]!r}, which is not supported; send messages, function calls, their "
                "outputs and reasoning, each as a whole item.",
                param=f"{where}.type",
            )


def _add_message(made: list[Message], where: str, item: Item) -> None:
    role = _required(where, "role", item.role)
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role must be user, assistant, system or developer, not {role[:64]!r}.", param=f"{where}.role"
        )
    if item.content is None:
        raise MissingField(f"`{where}.content` is required.", param=f"{where}.content")
    content = _content(f"{where}.content", item.content)
    if role == "assistant":
        turn = _assistant(made)
        # The parts of one generation are one text: what was generated, not a line each.
        turn.content = (turn.content or "") + "".join(part.text or "" for part in content)  # type: ignore[operator]
        return
    last = made[-1] if made else None
    if len(made) == 1 and made[0].role in HEADS and role in HEADS:
        role = made[0].role
    if last is not None and last.role == role and isinstance(last.content, list):
        last.content += content
    else:
        made.append(Message(role=role, content=content))


def _add_reasoning(made: list[Message], item: Item) -> None:
    shown = item.content if isinstance(item.content, list) else ()
    text = "".join(part.text or "" for part in shown) or carried(item.encrypted_content)
    last = made[-1] if made else None
    begun = last is not None and last.role == "assistant" and (last.content is not None or last.tool_calls)
    turn = Message(role="assistant") if last is None or last.role != "assistant" or begun else last
    if turn is not last:
        made.append(turn)
    turn.reasoning_content = (turn.reasoning_content or "") + text or None


def _assistant(made: list[Message]) -> Message:
    """The assistant message that goes on, or a new one."""
    if not made or made[-1].role != "assistant":
        made.append(Message(role="assistant"))
    return made[-1]


def _content(where: str, content: str | list[ItemPart]) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    return [ContentPart("text", _part_text(f"{where}[{at}]", part)) for at, part in enumerate(content)]


def _part_text(where: str, part: ItemPart) -> str:
    if part.type == "refusal":
        return _required(where, "refusal", part.refusal)
    if part.type not in TEXT_PARTS:
        raise Unsupported(
            f"`{where}` is of type {part.type[:64]!r}, which is not supported: this model reads only text.", param=where
        )
    return _required(where, "text", part.text)


def _required(where: str, name: str, value: str | None) -> str:
    if value is None:
        raise MissingField(f"`{where}.{name}` is required.", param=f"{where}.{name}")
    return value


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a request: each with its place in `tools`, and under the one name that the model knows.

    `namespaces` has what clients call those that they keep in a namespace: (namespace, name). `others` are the types of
    all other tools, which no model here knows how to call.
    """

    tools: list[tuple[int, dict[str, Any]]]
    namespaces: dict[str, tuple[str, str]]
    others: list[str]


def functions(tools: Sequence[dict[str, Any]]) -> Functions:
    """What of `tools` can be called."""
    found = Functions([], {}, [])
    for at, tool in enumerate(tools):
        match tool:
            case {"type": "function"}:
                found.tools.append((at, tool))
            case {"type": "namespace", "name": str() as namespace, "tools": list() as members}:
                for member in members:
                    match member:
                        case {"type": "function", "name": str() as name}:
                            full = full_name(namespace, name)
                            found.namespaces[full] = namespace, name
                            found.tools.append((at, {**member, "name": full}))
                        case _:
                            found.others.append(_type_of(member))
            case _:
                found.others.append(_type_of(tool))
    return found


def full_name(namespace: str | None, name: str) -> str:
    """A function's name where there are no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _type_of(tool: object) -> str:
    return str(tool.get("type"))[:64] if isinstance(tool, dict) else type(tool).__name__


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}


def tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """`tool_choice` in chat completions' form, which nests what this one says flat."""
    if choice is None or isinstance(choice, str):
        return choice
    match choice:
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": str() as mode, "tools": list() as tools}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_allowed(tool) for tool in tools]},
            }
        case {"type": "function"} | {"type": "allowed_tools"}:
            raise InvalidRequest(
                'tool_choice must be {"type": "function", "name"} or {"type": "allowed_tools", "mode", "tools"}.',
                param="tool_choice",
            )
    raise Unsupported(
        "`tool_choice` names a tool that is not supported: only functions can be called here.", param="tool_choice"
    )


def _allowed(tool: object) -> dict[str, Any]:
    match tool:
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    raise Unsupported(
        "`tool_choice.tools` may hold only functions, by name: no other tool can be called here.",
        param="tool_choice.tools",
    )


def response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """`text.format` in chat completions' form."""
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
    return wanted


def template_kwargs(body: ResponsesBody) -> dict[str, Any] | None:
    """The client's own template variables, and how much to think under the names that templates know."""
    given = dict(body.chat_template_kwargs or {})
    effort = body.reasoning.effort if body.reasoning is not None else None
    return with_effort(given, effort) or None


def as_items(given: str | list[Item] | None) -> list[Item]:
    """The items of `input` in full: shorthands written out, each with an id."""
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    return [_in_full(item) for item in given or ()]


def _in_full(item: Item) -> Item:
    if item.type == "item_reference":
        return item
    content = item.content
    if isinstance(content, str):
        content = [ItemPart("output_text" if item.role == "assistant" else "input_text", content)]
    return msgspec.structs.replace(
        item, type=item.type or "message", id=item.id or f"item_{uuid.uuid4().hex}", content=content
    )
