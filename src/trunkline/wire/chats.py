"""What the readers of other formats share: whole JSON files, and chats as turns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trunkline.wire.traces import (
    UNREADABLE,
    Message,
    MessagesPrompt,
    ToolCall,
    TraceError,
    TurnKind,
    TurnTrace,
    open_trace,
)

T = TypeVar("T")


def stem(path: Path) -> str:
    """A file's name without `.gz` and the ending before it."""
    return Path(path.name.removesuffix(".gz")).stem


def read_whole(path: Path, kind: type[T], what: str) -> T:
    """A whole file as one JSON value. Raises `TraceError`, which says that it is not `what`."""
    try:
        with open_trace(path) as file:
            return msgspec.json.decode(file.read(), type=kind)
    except UNREADABLE as error:
        raise TraceError(path, None, f"cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise TraceError(path, None, f"not {what}: {error}") from error


class _Part(msgspec.Struct):
    """One part of a message. OpenAI calls its text `text`, OpenTelemetry `content`."""

    type: str = "text"
    text: str | None = None
    content: Any = None
    id: str | None = None
    name: str = ""
    arguments: Any = None
    response: Any = None
    result: Any = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class ChatMessage(msgspec.Struct):
    """A chat message as agents' logs have it: in OpenAI's shape, in SWE-agent's, or in OpenTelemetry's with `parts`."""

    role: str
    content: str | list[_Part] | None = None
    parts: list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    tool_call_ids: list[str] | None = None

    def message(self) -> Message:
        """As traces have it."""
        parts = self.content if isinstance(self.content, list) else self.parts or []
        text = self.content if isinstance(self.content, str) else "".join(map(_part_text, parts))
        named = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or []]
        named += [(part.id, part.name, part.arguments) for part in parts if part.type == "tool_call"]
        calls = [ToolCall(call or "", name, _json(arguments)) for call, name, arguments in named]
        answered = [part.id or "" for part in parts if part.type == "tool_call_response"]
        answers = self.tool_call_id or next(iter(self.tool_call_ids or answered), "")
        return Message(self.role, text, tuple(calls), answers, self.name or "")


def _part_text(part: _Part) -> str:
    if part.type == "tool_call_response":
        return _json(part.response if part.result is None else part.result)
    return part.text or (part.content if isinstance(part.content, str) else "")


def _json(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def chat_turns(messages: Sequence[Message], given: Sequence[bool] = ()) -> Iterator[TurnTrace]:
    """A turn for every assistant message that follows others: its prompt is what stands before it.

    `given[i]` says that message `i` was not generated here (a demonstration), although it is an assistant's.
    """
    before = 0
    for at, message in enumerate(messages):
        if message.role != "assistant" or not at or (given and given[at]):
            continue
        prompt = MessagesPrompt(keep=before, add=tuple(messages[before:at]))
        yield TurnTrace(
            prompt=prompt, kind=answered(prompt.add), output=message.content or None, calls=message.tool_calls
        )
        before = at


def answered(added: Sequence[Message]) -> TurnKind:
    """What a turn answers that brought these messages: a tool's result before a user's word."""
    roles = {message.role for message in added}
    if "tool" in roles:
        return TurnKind.TOOL
    return TurnKind.USER if "user" in roles else TurnKind.UNKNOWN


def change(before: Sequence[Message], now: Sequence[Message]) -> MessagesPrompt:
    """The prompt `now` as told by what changed since the prompt `before`."""
    keep = 0
    while keep < min(len(before), len(now)) and before[keep] == now[keep]:
        keep += 1
    return MessagesPrompt(keep=keep, add=tuple(now[keep:]))
