"""`/v1/chat/completions`' replies, whole and in chunks."""

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET

from trunkline.gateway.context import TokenTexts
from trunkline.gateway.errors import ApiError
from trunkline.gateway.replies import DONE, Finish, Outcome, encode, finite
from trunkline.wire.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from trunkline.wire.outputs import CallArguments, CallBegun, Part, Text, Thinking
from trunkline.wire.turns import Delta, PromptLogprobs, TokenLogprob


class ChatReply:
    """One chat answer. Chunks are joined from parts that are formatted once."""

    def __init__(self, model: str, n: int, token_text: TokenTexts, *, with_usage: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._token_text = token_text
        self._opened = [False] * n
        self._head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            self._id.encode(),
            self._created,
            encode(model),
        )
        self._with_usage = with_usage
        self._no_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, finish: bytes, usage: Usage | None) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            choice,
            delta,
            logprobs,
            finish,
            self._no_usage if usage is None else b',"usage":%b}\n\n' % encode(usage),
        )

    def _role(self, choice: int, usage: Usage | None) -> bytes:
        """The chunk with the role, before a choice's first text."""
        if self._opened[choice]:
            return b""
        self._opened[choice] = True
        return self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null", usage)

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """Chat never asks for them."""
        raise AssertionError("prompt logprobs in a chat reply")

    def opening(self) -> bytes:
        """As `Reply.opening`: nothing."""
        return b""

    def placed(self, choice: int, usage: Usage) -> bytes:
        """As `Reply.placed`: nothing."""
        return b""

    def delta(self, choice: int, parts: Sequence[Part], delta: Delta, usage: Usage | None) -> bytes:
        """As `Reply.delta`."""
        if not parts and not delta.logprobs and usage is None:
            return b""
        logprobs = encode(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        return self._role(choice, usage) + self._chunk(choice, _delta(parts), logprobs, b"null", usage)

    def last(self, choice: int, finish: Finish, usage: Usage | None) -> bytes:
        """As `Reply.last`."""
        reason = b'"%b","stop_reason":%b' % (finish.reason.encode(), encode(finish.stopped_by))
        return self._role(choice, usage) + self._chunk(choice, b"{}", b"null", reason, usage)

    def end(self, usage: Usage) -> bytes:
        """As `Reply.end`: the chunk without choices if it was asked for, and the terminator."""
        return (b'%b],"usage":%b}\n\n' % (self._head, encode(usage)) if self._with_usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        """As `Reply.error`: no terminator follows."""
        return b"data: %b\n\n" % error.body()

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """As `Reply.whole`."""
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(at, outcome) for at, outcome in enumerate(outcomes)],
                usage=usage,
            )
        )

    def _choice(self, at: int, outcome: Outcome) -> ChatChoice:
        assert outcome.finish is not None
        return ChatChoice(
            index=at,
            message=_message(outcome),
            logprobs=self._logprobs(outcome.logprobs) if outcome.logprobs else None,
            finish_reason=outcome.finish.reason,
            stop_reason=outcome.finish.stopped_by,
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs([self._token_logprob(entry) for entry in entries])

    def _token_logprob(self, entry: TokenLogprob) -> ChatTokenLogprob:
        text = self._token_text(entry.token)
        return ChatTokenLogprob(
            token=text,
            logprob=finite(entry.logprob),
            bytes=_bytes(text),
            top_logprobs=[self._top(token, logprob) for token, logprob in entry.top],
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text = self._token_text(token)
        return TopLogprob(token=text, logprob=finite(logprob), bytes=_bytes(text))


def _bytes(text: str) -> list[int] | None:
    """UTF-8 of a token's text; None where replacement characters hide what it really was."""
    return None if "\ufffd" in text else list(text.encode())


def _delta(parts: Sequence[Part]) -> bytes:
    """One delta with all of `parts`. Clients gather each field by itself, so the order between fields says nothing."""
    if not parts:
        return b'{"content":""}'
    if len(parts) == 1 and isinstance(parts[0], Text):
        return b'{"content":%b}' % encode(parts[0].text)
    content = [part.text for part in parts if isinstance(part, Text)]
    thinking = [part.text for part in parts if isinstance(part, Thinking)]
    reasoning = "".join(thinking) if thinking else UNSET
    return encode(
        ChatDelta(
            content="".join(content) if content else UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=_call_deltas(parts) or UNSET,
        )
    )


def _call_deltas(parts: Sequence[Part]) -> list[ToolCallDelta]:
    """One entry a call: some clients take only one an index from a chunk."""
    begun = {part.index: part for part in parts if isinstance(part, CallBegun)}
    arguments = dict.fromkeys(begun, "")
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    return [_call_delta(index, begun.get(index), text) for index, text in sorted(arguments.items())]


def _call_delta(index: int, begun: CallBegun | None, arguments: str) -> ToolCallDelta:
    if begun is None:
        return ToolCallDelta(index=index, function=FunctionDelta(arguments=arguments))
    function = FunctionDelta(name=begun.name, arguments=arguments)
    return ToolCallDelta(index=index, id=begun.id, type="function", function=function)


def _message(outcome: Outcome) -> AssistantMessage:
    calls = [ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in outcome.calls]
    thinking = outcome.thinking or UNSET
    return AssistantMessage(
        content=None if calls and not outcome.text else outcome.text,
        reasoning_content=thinking,
        reasoning=thinking,
        tool_calls=calls or UNSET,
    )
