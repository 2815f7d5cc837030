"""What a model said, read: the parts every API's replies are made of, whatever format the model writes.

A turn's visible text becomes a sequence of parts. Text and thinking come in pieces; a tool call is opened by
`CallBegun`, and its arguments (JSON text, exactly as generated) follow in pieces of the same `index`. Concatenated, the
pieces are the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """More of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a tool: its `index`-th call (from 0) of this turn. `id` is unique for ever."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Part = Text | Thinking | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class Call:
    """One call, whole. `arguments` is the JSON text as it was generated, which a token limit may have cut."""

    id: str
    name: str
    arguments: str


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """The calls among `parts`, put together, in order."""
    pieces: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            pieces.setdefault(part.index, []).append(part.text)
    begun = [part for part in parts if isinstance(part, CallBegun)]
    return [Call(part.id, part.name, "".join(pieces.get(part.index, ()))) for part in begun]
