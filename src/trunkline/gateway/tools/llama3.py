r"""Llama 3.1 and later: the whole answer is one call, or text.

{"name": "add", "parameters": {"a": 1}}
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.gateway.tools.declared import Choice, Tool
from trunkline.gateway.tools.lark import moved, schema_rule
from trunkline.gateway.tools.scan import CallScan, NewId
from trunkline.gateway.tools.syntax import Shape, call_head, call_rules, free_text
from trunkline.wire.outputs import Part, Text

KEY = "parameters"
_MAY_BE_CALL = re.compile(r'\s*(?:\{\s*(?:"[a-z]{0,16}(?:"[^{}\[\]]{0,256})?)?)?', re.DOTALL)
"""What the head of a call looks like so far. Anything else is an answer, and is shown at once."""


class Llama3:
    """Implements `Syntax`. Its templates render one call a message, so no more are asked for."""

    markers: Sequence[str] = ()

    def __init__(self, control: Mapping[str, int]) -> None:
        """Calls have no markers."""

    def grammar(self, shape: Shape) -> str:
        """As `Syntax.grammar`. An answer may be JSON, as long as it does not begin as a call of a known tool."""
        names = shape.choice.names
        rules = call_rules(names, KEY)
        if shape.choice.required:
            return rules + "body: call\n"
        if shape.schema is not None:
            return f"body: {schema_rule(_either(shape.choice.tools, shape.schema))}\n"
        if shape.answer is not None:
            return rules + f"body: {shape.answer} | call\n"
        heads = tuple(call_head(name, KEY) for name in names)
        return rules + free_text((*shape.never, *heads)) + "text: TEXT\nbody: text | call\n"

    def silence(self, names: Sequence[str], never: Sequence[str]) -> str:
        """As `Syntax.silence`."""
        return free_text((*never, *(call_head(name, KEY) for name in names))) + "body: TEXT\n"

    def reader(self, choice: Choice, new_id: NewId) -> "BareReader":
        """As `Syntax.reader`."""
        return BareReader(choice, new_id)


def _either(tools: Sequence[Tool], answer: Mapping[str, Any]) -> dict[str, Any]:
    """One schema for an answer or a call: both begin alike, which only alternatives within one schema may."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, KEY: {"$ref": f"#/$defs/args{at}"}},
            "required": ["name", KEY],
            "additionalProperties": False,
        }
        for at, tool in enumerate(tools)
    ]
    parts = {"answer": answer} | {f"args{at}": tool.parameters for at, tool in enumerate(tools)}
    return {
        "anyOf": [{"$ref": "#/$defs/answer"}, *calls],
        "$defs": {name: moved(schema, f"#/$defs/{name}") for name, schema in parts.items()},
    }


class BareReader:
    """Implements `Reader`."""

    def __init__(self, choice: Choice, new_id: NewId) -> None:
        self._scan = CallScan(0, frozenset(choice.names), new_id)
        self._text = False
        self._blank = False

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        parts: list[Part] = []
        if not self._text:
            parts, text = self._read(text)
        if self._blank:  # behind a call
            text = text.lstrip()
            self._blank = not text
        if text:
            parts.append(Text(text))
        return parts

    def _read(self, text: str) -> tuple[list[Part], str]:
        """The call, if it is one; and what is certainly text."""
        scan = self._scan
        parts = scan.feed(text)
        if scan.over:
            self._text, self._blank = True, not scan.failed
            return parts, scan.rest
        if scan.begun or _MAY_BE_CALL.fullmatch(scan.unread):
            return parts, ""
        self._text = True
        return parts, scan.unread

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        if self._text:
            return ()
        left = self._scan.rest.strip() if self._scan.begun else self._scan.unread
        return (Text(left),) if left else ()
