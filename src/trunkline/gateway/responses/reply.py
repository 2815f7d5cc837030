"""`/v1/responses`' replies, whole and as events.

A stream is `response.created`, `response.in_progress`, then for each output item `response.output_item.added`, its
parts and deltas, `response.output_item.done`, and at last `response.completed`, `.incomplete` or `.failed`.
Every event has a `sequence_number`, from 0. A whole answer is a stream that nobody hears: both are made alike.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trunkline.gateway.context import TokenTexts
from trunkline.gateway.errors import ApiError, QueueFull
from trunkline.gateway.replies import Finish, Outcome, encode
from trunkline.gateway.responses.items import OpenCall, OpenItem, OpenMessage, OpenReasoning, text_logprobs
from trunkline.wire.openai import Usage
from trunkline.wire.outputs import CallArguments, CallBegun, Part, Text, Thinking
from trunkline.wire.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    TextLogprob,
)
from trunkline.wire.turns import Delta, PromptLogprobs, TokenLogprob

COMPLETED, INCOMPLETE, FAILED = "completed", "incomplete", "failed"
LENGTH = "length"

Keep = Callable[[ResponseObject], None]
"""What to do with a response that ended by itself: store it, or nothing."""


class ResponsesReply:
    """One response. It has one choice: the API knows no more."""

    def __init__(
        self,
        begun: ResponseObject,
        token_text: TokenTexts,
        keep: Keep,
        *,
        carry_thinking: bool,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """`begun` is the response in progress; `carry_thinking` adds `encrypted_content` to reasoning items.

        `namespaces` has the functions that the client knows by a namespace and a name.
        """
        self._response = begun
        self._token_text = token_text
        self._keep = keep
        self._carry_thinking = carry_thinking
        self._namespaces = namespaces
        self._sequence = 0
        self._done: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._held: list[TokenLogprob] = []
        self._finish: Finish | None = None

    # --- events ------------------------------------------------------------------------------------------------

    def _event(self, name: str, data: bytes) -> bytes:
        """One event; `data` are its own members, without braces."""
        kind = name.encode()
        made = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, self._sequence, data)
        self._sequence += 1
        return made

    def _response_event(self, name: str) -> bytes:
        return self._event(f"response.{name}", b'"response":%b' % encode(self._response))

    def opening(self) -> bytes:
        """As `Reply.opening`."""
        return self._response_event("created") + self._response_event("in_progress")

    def placed(self, choice: int, usage: Usage) -> bytes:
        """As `Reply.placed`: nothing, since the usage comes last."""
        return b""

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """No request of this API asks for them."""
        raise AssertionError("prompt logprobs in a response")

    def delta(self, choice: int, parts: Sequence[Part], delta: Delta, usage: Usage | None) -> bytes:
        """As `Reply.delta`."""
        self._held += delta.logprobs
        return b"".join([self._part(part) for part in parts])

    def _part(self, part: Part) -> bytes:
        match part:
            case Text(text):
                begun = b"" if isinstance(self._open, OpenMessage) else self._begin(OpenMessage())
                return begun + self._grow(text, self._taken_logprobs())
            case Thinking(text):
                self._held.clear()
                begun = (
                    b"" if isinstance(self._open, OpenReasoning) else self._begin(OpenReasoning(self._carry_thinking))
                )
                return begun + self._grow(text, [])
            case CallBegun(_, id, name):
                self._held.clear()
                namespace, own = self._namespaces.get(name, (None, name))
                return self._begin(OpenCall(id, own, namespace))
            case CallArguments(_, text):
                assert isinstance(self._open, OpenCall), "arguments outside their call"
                return self._grow(text, [])

    def _taken_logprobs(self) -> list[TextLogprob]:
        """Logprobs of the tokens that made the text which comes next."""
        made = text_logprobs(self._held, self._token_text)
        self._held.clear()
        return made

    def _begin(self, item: OpenItem) -> bytes:
        closed = self._close(COMPLETED)
        self._open = item
        item.index = len(self._done)
        return closed + b"".join([self._event(name, data) for name, data in item.opening()])

    def _grow(self, text: str, logprobs: list[TextLogprob]) -> bytes:
        assert self._open is not None
        return self._event(*self._open.grow(text, logprobs))

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, self._open = self._open, None
        events = [self._event(name, data) for name, data in item.closing(status)]
        self._done.append(item.item(status))
        return b"".join(events)

    def last(self, choice: int, finish: Finish, usage: Usage | None) -> bytes:
        """As `Reply.last`."""
        self._finish = finish
        return self._close(INCOMPLETE if finish.reason == LENGTH else COMPLETED)

    def end(self, usage: Usage) -> bytes:
        """As `Reply.end`: the whole response, which is kept from here on."""
        assert self._finish is not None
        cut = self._finish.reason == LENGTH
        self._response = msgspec.structs.replace(
            self._response,
            status=INCOMPLETE if cut else COMPLETED,
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self._done,
            usage=_usage(usage, self._finish.thinking_tokens),
        )
        self._keep(self._response)
        return self._response_event(INCOMPLETE if cut else COMPLETED)

    def error(self, error: ApiError) -> bytes:
        """As `Reply.error`: `response.failed`, with what was said so far. Such a response is not kept."""
        closed = self._close(INCOMPLETE)
        code = "rate_limit_exceeded" if error.status == QueueFull.status else "server_error"
        self._response = msgspec.structs.replace(
            self._response, status=FAILED, error=ResponseError(code, error.message), output=self._done
        )
        return closed + self._response_event(FAILED)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """As `Reply.whole`."""
        (outcome,) = outcomes
        assert outcome.finish is not None
        for parts, logprobs in outcome.steps:
            self.delta(0, parts, Delta((), "", tuple(logprobs)), None)
        self.last(0, outcome.finish, None)
        self.end(usage)
        return encode(self._response)


def _usage(usage: Usage, thinking_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens),
        total_tokens=usage.total_tokens,
    )


def new_id() -> str:
    """An id for a response."""
    return f"resp_{uuid.uuid4().hex}"
