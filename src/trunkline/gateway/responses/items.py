"""Output items in the making: what each kind says when it begins, grows and ends. Events are (name, own members)."""

import uuid
from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET

from trunkline.gateway.context import TokenTexts
from trunkline.gateway.replies import encode, finite
from trunkline.gateway.responses.translate import carry
from trunkline.wire.responses import (
    FunctionCall,
    LogprobAlternative,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    TextLogprob,
)
from trunkline.wire.turns import TokenLogprob

Event = tuple[str, bytes]


class OpenItem(Protocol):
    """One item that grows. `index` is its place in the output, set before `opening`."""

    index: int

    def opening(self) -> list[Event]:
        """The events that begin it."""

    def grow(self, text: str, logprobs: list[TextLogprob]) -> Event:
        """More of its text."""

    def closing(self, status: str) -> list[Event]:
        """The events that end it."""

    def item(self, status: str) -> OutputItem:
        """The item as it is now."""


class _Opened:
    """What all kinds share: an id, a place, and text in pieces."""

    prefix = ""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = 0
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def place(self) -> bytes:
        """Which item an event is about."""
        return b'"item_id":"%b","output_index":%d' % (self.id.encode(), self.index)

    def part_place(self) -> bytes:
        """Which part of it: every item has one part at most."""
        return self.place() + b',"content_index":0'

    def added(self, item: OutputItem) -> Event:
        return "response.output_item.added", b'"output_index":%d,"item":%b' % (self.index, encode(item))

    def done(self, item: OutputItem) -> Event:
        return "response.output_item.done", b'"output_index":%d,"item":%b' % (self.index, encode(item))


class OpenMessage(_Opened):
    """The answer's text."""

    prefix = "msg"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[TextLogprob] = []

    def opening(self) -> list[Event]:
        """As `OpenItem.opening`."""
        empty = OutputMessage(id=self.id, status="in_progress", content=[])
        part = b'%b,"part":%b' % (self.part_place(), encode(OutputText(text="")))
        return [self.added(empty), ("response.content_part.added", part)]

    def grow(self, text: str, logprobs: list[TextLogprob]) -> Event:
        """As `OpenItem.grow`."""
        self.pieces.append(text)
        self.logprobs += logprobs
        data = b'%b,"delta":%b,"logprobs":%b' % (self.part_place(), encode(text), encode(logprobs))
        return "response.output_text.delta", data

    def closing(self, status: str) -> list[Event]:
        """As `OpenItem.closing`."""
        place, part = self.part_place(), self._part()
        done = b'%b,"text":%b,"logprobs":%b' % (place, encode(part.text), encode(part.logprobs))
        return [
            ("response.output_text.done", done),
            ("response.content_part.done", b'%b,"part":%b' % (place, encode(part))),
            self.done(self.item(status)),
        ]

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self.logprobs)

    def item(self, status: str) -> OutputItem:
        """As `OpenItem.item`."""
        return OutputMessage(id=self.id, status=status, content=[self._part()])


class OpenReasoning(_Opened):
    """The reasoning."""

    prefix = "rs"

    def __init__(self, carried: bool) -> None:
        super().__init__()
        self._carried = carried

    def opening(self) -> list[Event]:
        """As `OpenItem.opening`."""
        empty = ReasoningItem(id=self.id, content=[], status="in_progress")
        part = b'%b,"part":%b' % (self.part_place(), encode(ReasoningText("")))
        return [self.added(empty), ("response.content_part.added", part)]

    def grow(self, text: str, logprobs: list[TextLogprob]) -> Event:
        """As `OpenItem.grow`."""
        self.pieces.append(text)
        return "response.reasoning_text.delta", b'%b,"delta":%b' % (self.part_place(), encode(text))

    def closing(self, status: str) -> list[Event]:
        """As `OpenItem.closing`."""
        place, text = self.part_place(), self.text
        return [
            ("response.reasoning_text.done", b'%b,"text":%b' % (place, encode(text))),
            ("response.content_part.done", b'%b,"part":%b' % (place, encode(ReasoningText(text)))),
            self.done(self.item(status)),
        ]

    def item(self, status: str) -> OutputItem:
        """As `OpenItem.item`."""
        text = self.text
        encrypted = carry(text) if self._carried else UNSET
        return ReasoningItem(id=self.id, content=[ReasoningText(text)], encrypted_content=encrypted, status=status)


class OpenCall(_Opened):
    """A call of a function; its text are its arguments."""

    prefix = "fc"

    def __init__(self, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__()
        self._namespace = UNSET if namespace is None else namespace
        self._call_id = call_id
        self._name = name

    def opening(self) -> list[Event]:
        """As `OpenItem.opening`."""
        return [self.added(self.item("in_progress"))]

    def grow(self, text: str, logprobs: list[TextLogprob]) -> Event:
        """As `OpenItem.grow`."""
        self.pieces.append(text)
        return "response.function_call_arguments.delta", b'%b,"delta":%b' % (self.place(), encode(text))

    def closing(self, status: str) -> list[Event]:
        """As `OpenItem.closing`."""
        done = b'%b,"name":%b,"arguments":%b' % (self.place(), encode(self._name), encode(self.text))
        return [("response.function_call_arguments.done", done), self.done(self.item(status))]

    def item(self, status: str) -> OutputItem:
        """As `OpenItem.item`."""
        return FunctionCall(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            arguments=self.text,
            status=status,
        )


def text_logprobs(entries: Sequence[TokenLogprob], token_text: TokenTexts) -> list[TextLogprob]:
    """Log probabilities as this API shows them."""
    return [
        TextLogprob(
            token=token_text(entry.token),
            bytes=_bytes(token_text(entry.token)),
            logprob=finite(entry.logprob),
            top_logprobs=[
                LogprobAlternative(token_text(token), _bytes(token_text(token)), finite(logprob))
                for token, logprob in entry.top
            ],
        )
        for entry in entries
    ]


def _bytes(text: str) -> list[int]:
    """UTF-8 of a token's text; none where replacement characters hide what it really was."""
    return [] if "\ufffd" in text else list(text.encode())
