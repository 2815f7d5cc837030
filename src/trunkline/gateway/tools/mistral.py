r"""Mistral: a control token, then all calls in one list.

[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
"""

from collections.abc import Mapping, Sequence

from trunkline.gateway.tools.declared import Choice
from trunkline.gateway.tools.lark import Marker, quoted
from trunkline.gateway.tools.memory import Said
from trunkline.gateway.tools.scan import CallScan, NewId, held_back
from trunkline.gateway.tools.syntax import Shape, call_rules, marked_body, unmarked_body
from trunkline.wire.outputs import Part, Text

BEGIN = "[TOOL_CALLS]"


class Mistral:
    """Implements `Syntax`."""

    markers = (BEGIN,)

    def __init__(self, control: Mapping[str, int]) -> None:
        self._begin = Marker(BEGIN, control)

    def grammar(self, shape: Shape) -> str:
        """As `Syntax.grammar`. Some of these models were taught a blank before the list, some none."""
        comma = quoted(", ")
        more = f" ({comma} call)*" if shape.choice.parallel else ""
        rules = call_rules(shape.choice.names, "arguments")
        rules += f"calls: {quoted(' ')}? {quoted('[')} call{more} {quoted(']')}\n"
        return rules + marked_body(shape, self._begin)

    def silence(self, names: Sequence[str], never: Sequence[str]) -> str:
        """As `Syntax.silence`."""
        return unmarked_body(never, self._begin, BEGIN)

    def reader(self, choice: Choice, new_id: NewId) -> "ListReader":
        """As `Syntax.reader`."""
        return ListReader(choice, new_id)


class ListReader:
    """Implements `Reader`."""

    def __init__(self, choice: Choice, new_id: NewId) -> None:
        self._names = frozenset(choice.names)
        self._new_id = new_id
        self._calls = 0
        self._held = ""
        self._passed = ""
        self._in_list = False
        self._scan: CallScan | None = None

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        parts: list[Part] = []
        while text:
            if self._scan is not None:
                parts += self._scan.feed(text)
                text = self._leave(self._scan, parts) if self._scan.over else ""
            elif self._in_list:
                text = self._between(text, parts)
            else:
                text = self._read(text, parts)
        return parts

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        left = self._passed + self._held
        if self._scan is not None:
            left = self._scan.rest if self._scan.begun else self._passed + self._scan.unread
        cut = self._scan is not None and not self._scan.begun
        if self._calls and (cut or not left.strip(", \n")):
            left = ""  # what separates calls, or the next one, cut before it was one
        return (Text(left),) if left else ()

    def _read(self, text: str, parts: list[Part]) -> str:
        """Text up to the list; returns what is behind its marker."""
        held = self._held + text
        before, marker, rest = held.partition(BEGIN)
        shown = before
        if marker:
            self._held, self._passed, self._in_list = "", BEGIN, True
        else:
            shown = before[: len(before) - held_back(before, BEGIN)]
            self._held = before[len(shown) :]
        if shown and not (self._calls and not shown.strip()):
            parts.append(Text(shown))
        return rest

    def _between(self, text: str, parts: list[Part]) -> str:
        """Before a call or the list's end. `_passed` keeps the signs read since, in case no call comes."""
        held = self._held + text
        follows = held.lstrip(" \n[,")
        self._held = ""
        if not follows:
            self._passed += held
            return ""
        self._passed += held[: len(held) - len(follows)]
        if follows[0] == "{":
            self._scan = CallScan(self._calls, self._names, self._new_id)
            return follows
        self._in_list = False
        if follows[0] == "]" and self._calls:
            self._passed = ""
            return follows[1:]
        passed, self._passed = self._passed, ""
        parts.append(Text(passed))
        return follows

    def _leave(self, scan: CallScan, parts: list[Part]) -> str:
        """The object is over; returns what is behind it."""
        self._scan = None
        if scan.failed:
            parts.append(Text(self._passed))
            self._passed, self._in_list = "", False
        else:
            self._calls += 1
            self._passed = ""
        return scan.rest


def restored(rendered: str, said: Said) -> str:
    """`rendered` with `said` as it was generated, if the list of its calls is found by the ids in it.

    These templates leave out the text before calls; where one does not, that text is replaced too.
    """
    first, last = (f'"id": "{said.calls[at].id}"' for at in (0, -1))
    start = rendered.rfind(BEGIN, 0, max(rendered.find(first), 0))
    tail = last + "}]"
    end = rendered.find(tail, start)
    if start < 0 or end < 0:
        return rendered
    before, content = rendered[:start], said.content.strip()
    if content and before.rstrip().endswith(content):
        before = before.rstrip().removesuffix(content)
    return said.placed_behind(before) + rendered[end + len(tail) :]
