"""`/v1/messages`' replies, whole and as events.

A stream is `message_start` and `ping`, then for each content block `content_block_start`, deltas, `content_block_stop`,
then `message_delta` with why it stopped and the usage, and `message_stop`. Blocks come one after the other.
"""

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from trunkline.gateway.errors import ANTHROPIC_PATH, ApiError
from trunkline.gateway.replies import TOOL_CALLS, Finish, Outcome, encode
from trunkline.wire.anthropic import (
    ContentBlock,
    MessageReply,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from trunkline.wire.openai import Usage
from trunkline.wire.outputs import CallArguments, CallBegun, Part, Text, Thinking
from trunkline.wire.turns import Delta, PromptLogprobs

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
LENGTH = "length"


def event(name: bytes, data: bytes) -> bytes:
    """One named event."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


def stop_reason(finish: Finish, *, clipped: bool) -> tuple[str, str | None]:
    """Anthropic's `stop_reason` and `stop_sequence`. `clipped`: the context was shorter than the limit asked for."""
    if finish.reason == TOOL_CALLS:
        return "tool_use", None
    if finish.reason == LENGTH:
        return ("model_context_window_exceeded" if clipped else "max_tokens"), None
    if isinstance(finish.stopped_by, str):
        return "stop_sequence", finish.stopped_by
    return "end_turn", None


def signature(thinking: str) -> str:
    """What stands where Anthropic signs its thinking: a digest of the text."""
    return hashlib.sha256(thinking.encode()).hexdigest()


class MessagesReply:
    """One message. It has one choice: the API knows no more."""

    def __init__(self, model: str, *, clipped: bool) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._clipped = clipped
        self._index = -1
        self._open: type[Part] | None = None
        self._thought: list[str] = []
        self._finish: Finish | None = None

    def opening(self) -> bytes:
        """As `Reply.opening`: nothing, since `message_start` has the usage."""
        return b""

    def placed(self, choice: int, usage: Usage) -> bytes:
        """As `Reply.placed`: `message_start`."""
        message = self._message([], None, None, _usage(usage, 0))
        return event(b"message_start", b'{"type":"message_start","message":%b}' % encode(message)) + PING

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """No request of this API asks for them."""
        raise AssertionError("prompt logprobs in a message")

    def delta(self, choice: int, parts: Sequence[Part], delta: Delta, usage: Usage | None) -> bytes:
        """As `Reply.delta`."""
        return b"".join([self._part(part) for part in parts])

    def _part(self, part: Part) -> bytes:
        match part:
            case Text(text):
                return self._begin(Text, b'{"type":"text","text":""}') + self._delta(b"text_delta", b"text", text)
            case Thinking(text):
                begun = self._begin(Thinking, b'{"type":"thinking","thinking":"","signature":""}')
                self._thought.append(text)
                return begun + self._delta(b"thinking_delta", b"thinking", text)
            case CallBegun(_, id, name):
                closed = self._close()
                return closed + self._begin(CallBegun, encode(ToolUseBlock(id=id, name=name, input={})))
            case CallArguments(_, text):
                assert self._open is CallBegun, "arguments outside their call"
                return self._delta(b"input_json_delta", b"partial_json", text)

    def _begin(self, kind: type[Part], block: bytes) -> bytes:
        """Open a block, unless one of its kind is open; what was open is closed first."""
        if self._open is kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        data = b'{"type":"content_block_start","index":%d,"content_block":%b}' % (self._index, block)
        return closed + event(b"content_block_start", data)

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        data = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}' % (
            self._index,
            kind,
            field,
            encode(text),
        )
        return event(b"content_block_delta", data)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Thinking:
            signed = self._delta(b"signature_delta", b"signature", signature("".join(self._thought)))
            self._thought.clear()
        self._open = None
        return signed + event(b"content_block_stop", b'{"type":"content_block_stop","index":%d}' % self._index)

    def last(self, choice: int, finish: Finish, usage: Usage | None) -> bytes:
        """As `Reply.last`."""
        self._finish = finish
        return self._close()

    def end(self, usage: Usage) -> bytes:
        """As `Reply.end`: why it stopped, the final usage, `message_stop`."""
        assert self._finish is not None
        reason, sequence = stop_reason(self._finish, clipped=self._clipped)
        data = b'{"type":"message_delta","delta":{"stop_reason":%b,"stop_sequence":%b},"usage":%b}' % (
            encode(reason),
            encode(sequence),
            encode(_usage(usage, self._finish.thinking_tokens)),
        )
        return event(b"message_delta", data) + STOP

    def error(self, error: ApiError) -> bytes:
        """As `Reply.error`."""
        return event(b"error", error.body(ANTHROPIC_PATH))

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """As `Reply.whole`."""
        (outcome,) = outcomes
        assert outcome.finish is not None
        reason, sequence = stop_reason(outcome.finish, clipped=self._clipped)
        return encode(
            self._message(blocks(outcome.parts), reason, sequence, _usage(usage, outcome.finish.thinking_tokens))
        )

    def _message(
        self, content: list[ContentBlock], reason: str | None, sequence: str | None, usage: MessageUsage
    ) -> MessageReply:
        return MessageReply(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


def blocks(parts: Sequence[Part]) -> list[ContentBlock]:
    """The content blocks that `parts` make, as a stream would have opened and closed them."""
    made: list[ContentBlock] = []
    kind: type[Part] | None = None
    call: CallBegun | None = None
    pieces: list[str] = []

    def close() -> None:
        text = "".join(pieces)
        pieces.clear()
        if kind is Text:
            made.append(TextBlock(text))
        elif kind is Thinking:
            made.append(ThinkingBlock(text, signature(text)))
        elif call is not None and kind is CallBegun:
            made.append(ToolUseBlock(id=call.id, name=call.name, input=_input(text)))

    for part in parts:
        if isinstance(part, CallBegun):
            close()
            kind, call = CallBegun, part
            continue
        begins = CallBegun if isinstance(part, CallArguments) else type(part)
        if begins is not kind:
            close()
            kind = begins
        pieces.append(part.text)
    close()
    return made


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object they must be; empty where the token limit cut them off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage, thinking_tokens: int) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens),
    )
