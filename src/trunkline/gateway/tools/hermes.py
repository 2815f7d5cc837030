r"""Hermes and Qwen: each call between tags, behind the text if there is any.

Let me look.
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from collections.abc import Mapping, Sequence

from trunkline.gateway.tools.declared import Choice
from trunkline.gateway.tools.lark import Marker, quoted
from trunkline.gateway.tools.scan import CallScan, NewId, held_back
from trunkline.gateway.tools.syntax import Shape, call_rules, marked_body, unmarked_body
from trunkline.wire.outputs import Part, Text

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """Implements `Syntax`."""

    markers = (BEGIN, END)

    def __init__(self, control: Mapping[str, int]) -> None:
        self._begin, self._end = Marker(BEGIN, control), Marker(END, control)

    def grammar(self, shape: Shape) -> str:
        """As `Syntax.grammar`. Behind a call only calls follow: what comes next is the tools' to say."""
        begin, end, line = self._begin.rule, self._end.rule, quoted("\n")
        one = f"{line} call {line} {end}"
        more = f" ({line} {begin} {one})*" if shape.choice.parallel else ""
        rules = call_rules(shape.choice.names, "arguments") + f"calls: {one}{more}\n"
        return rules + marked_body(shape, self._begin)

    def silence(self, names: Sequence[str], never: Sequence[str]) -> str:
        """As `Syntax.silence`."""
        return unmarked_body(never, self._begin, BEGIN)

    def reader(self, choice: Choice, new_id: NewId) -> "TaggedReader":
        """As `Syntax.reader`."""
        return TaggedReader(choice, new_id)


class TaggedReader:
    """Implements `Reader`. The blanks around calls belong to their form, not to the text."""

    def __init__(self, choice: Choice, new_id: NewId) -> None:
        self._names = frozenset(choice.names)
        self._new_id = new_id
        self._calls = 0
        self._held = ""
        self._lead = ""
        self._scan: CallScan | None = None
        self._closing = False

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        parts: list[Part] = []
        while text:
            if self._scan is not None:
                parts += self._scan.feed(text)
                text = self._leave(self._scan, parts) if self._scan.over else ""
            elif self._closing:
                text = self._close(text)
            else:
                text = self._read(text, parts)
        return parts

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        left = "" if self._closing else self._held  # an end tag cut in the middle
        if self._scan is not None:
            left = self._scan.rest if self._scan.begun else self._lead + BEGIN + self._scan.unread
        if self._calls and (BEGIN.startswith(left.strip()) or left.lstrip().startswith(BEGIN)):
            left = ""  # blanks, or the next call, cut before it was one: behind a call only calls follow
        return (Text(left),) if left else ()

    def _read(self, text: str, parts: list[Part]) -> str:
        """Text up to a call; returns what is behind its marker."""
        held = self._held + text
        before, marker, rest = held.partition(BEGIN)
        if marker:
            shown = before.rstrip()
            self._held, self._lead = "", before[len(shown) :]
            self._scan = CallScan(self._calls, self._names, self._new_id)
        else:
            certain = before[: len(before) - held_back(before, BEGIN)]
            shown = certain.rstrip()
            self._held = before[len(shown) :]
        if shown:
            parts.append(Text(shown))
        return rest

    def _leave(self, scan: CallScan, parts: list[Part]) -> str:
        """The object is over; returns what is behind it."""
        self._scan = None
        if scan.failed:
            parts.append(Text(self._lead + BEGIN))
        else:
            self._calls += 1
            self._closing = True
        return scan.rest

    def _close(self, text: str) -> str:
        """Behind a call: its end tag, if the model wrote it."""
        held = self._held + text
        follows = held.lstrip()
        if follows.startswith(END):
            self._held, self._closing = "", False
            return follows[len(END) :]
        if END.startswith(follows):
            self._held = held
            return ""
        self._held, self._closing = "", False
        return held
