"""The contract of a call syntax: how one family of models writes tool calls, as a grammar and as a reader."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trunkline.gateway.readers import Reader
from trunkline.gateway.tools.declared import Choice
from trunkline.gateway.tools.lark import ANY, Marker, any_of, quoted
from trunkline.gateway.tools.scan import NewId


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the answer of a turn may be.

    `choice.tools[i]`'s arguments match the rule `args{i}`. `answer` names the rule of an answer without calls (None:
    any text), `schema` its JSON schema, if it has one. `never` are texts that a free answer does not begin with,
    because they mean something else.
    """

    choice: Choice
    answer: str | None = None
    schema: Mapping[str, Any] | None = None
    never: tuple[str, ...] = ()


class Syntax(Protocol):
    """How one family of models writes tool calls. Its markers' control tokens are told when it is made."""

    @property
    def markers(self) -> Sequence[str]:
        """Fixed texts around calls."""

    def grammar(self, shape: Shape) -> str:
        """Rules; `body` matches the whole answer."""

    def silence(self, names: Sequence[str], never: Sequence[str]) -> str:
        """Rules; `body` matches any answer that calls none of `names` (and does not begin with one of `never`)."""

    def reader(self, choice: Choice, new_id: NewId) -> Reader:
        """Reads one answer: what looks like a call of `choice.tools` becomes one, all else is text."""


MakeSyntax = Callable[[Mapping[str, int]], Syntax]
"""Makes a syntax, given the control tokens among its markers."""


def call_rules(names: Sequence[str], key: str) -> str:
    """`call`: one object that calls one of `names`, with its arguments under `key`."""
    calls = [f"{quoted(call_head(name, key))} args{at} " + quoted("}") for at, name in enumerate(names)]
    return f"call: {any_of(calls)}\n"


def call_head(name: str, key: str) -> str:
    """What a call object begins with."""
    return f'{{"name": {quoted(name)}, "{key}": '


def free_text(never: Sequence[str], inside: str | None = None) -> str:
    """`TEXT`: any text that does not begin with one of `never`, nor holds `inside`."""
    if not never and inside is None:
        return f"TEXT: {ANY}\n"
    rules = f"ANY: {ANY}\n"
    barred = []
    if never:
        barred.append("NEVER")
        rules += f"NEVER: ({any_of([quoted(text) for text in never])}) ANY\n"
    if inside is not None:
        barred.append("HOLDS")
        rules += f"HOLDS: ANY {quoted(inside)} ANY\n"
    return rules + f"TEXT: ANY & ~({any_of(barred)})\n"


def marked_body(shape: Shape, begin: Marker) -> str:
    """`body`: an answer, or text and the rule `calls` behind the marker `begin`, as `shape` has it."""
    if shape.choice.required:
        return f"body: {begin.rule} calls\n"
    if shape.answer is not None:
        return f"body: {shape.answer} | {begin.rule} calls\n"
    head = "head" if begin.is_control else "head[lazy]"
    return free_text(shape.never) + f"text: TEXT\nbody: text | head calls\n{head}: TEXT {begin.rule}\n"


def unmarked_body(never: Sequence[str], begin: Marker, text: str) -> str:
    """`body`: any text without the marker `begin`, which is spelled `text`."""
    return free_text(never, None if begin.is_control else text) + "body: TEXT\n"
