"""Reading calls out of streamed text: JSON nesting, markers cut in the middle, one call object at a time."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from trunkline.wire.outputs import CallArguments, CallBegun, Part

NewId = Callable[[], str]
"""Makes ids for calls."""

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEAD = 2048
"""Characters within which a call must have named itself to be streamed; longer ones are read when they are whole."""


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` that may become `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class Nesting:
    """Follows the brackets of JSON text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def close(self, text: str) -> int | None:
        """Offset behind the bracket of `text` that closes the outermost level; None if it goes on."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _STRUCTURE.search(text, at)
            if found is None:
                return None
            at = found.end()
            if self._step(found[0]):
                return at
        return None

    def _step(self, sign: str) -> bool:
        if self._in_string:
            self._escaped = sign == "\\"
            self._in_string = sign != '"'
        elif sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallScan:
    """Reads one `{"name": ..., "arguments": {...}}` of a tool in `names`; arguments are passed on as they come.

    `over` tells when it is done; then `rest` is what follows. If it was no call after all, `failed` is set and `rest`
    is all that was fed. What models write otherwise (other key order, arguments as a string) is read once it is whole.
    """

    def __init__(self, index: int, names: Collection[str], new_id: NewId) -> None:
        self._index = index
        self._names = names
        self._new_id = new_id
        self._head = ""
        self._object = Nesting()
        self._arguments: Nesting | None = None
        self._tail: Nesting | None = None
        self.over = False
        self.failed = False
        self.begun = False
        self.rest = ""

    @property
    def unread(self) -> str:
        """What was fed while it is not yet known to be a call."""
        return "" if self.begun else self._head

    def feed(self, text: str) -> list[Part]:
        """Read more. Not to be called when `over`."""
        if self._tail is not None:
            self._close(text)
            return []
        if self._arguments is not None:
            return self._argue(text)
        self._head += text
        head = _HEAD.match(self._head) if len(self._head) - len(text) <= _MAX_HEAD else None
        if head is not None:
            name = _loads(head[1])
            if name not in self._names:
                return self._fail()
            self._arguments = Nesting()
            return [self._begin(name), *self._argue(self._head[head.end() :])]
        if self._head.strip() and not self._head.lstrip().startswith("{"):
            return self._fail()
        end = self._object.close(text)
        return [] if end is None else self._whole(len(self._head) - len(text) + end)

    def _begin(self, name: str) -> CallBegun:
        self.begun = True
        return CallBegun(self._index, self._new_id(), name)

    def _argue(self, text: str) -> list[Part]:
        assert self._arguments is not None
        end = self._arguments.close(text)
        piece = text[:end]
        parts: list[Part] = [CallArguments(self._index, piece)] if piece else []
        if end is not None:
            self._tail = Nesting(depth=1)
            self._close(text[end:])
        return parts

    def _close(self, text: str) -> None:
        """Skip to the object's own bracket; without one, what comes instead is not ours."""
        assert self._tail is not None
        self.rest += text
        follows = self.rest.lstrip()
        if not follows:
            return
        if follows[0] not in ",}":
            self.over = True
            return
        end = self._tail.close(text)
        if end is not None:
            self.rest, self.over = text[end:], True

    def _whole(self, end: int) -> list[Part]:
        """The object is complete and did not begin as usual."""
        value = _loads(self._head[:end])
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return self._fail()
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(_loads(text), dict):
            return self._fail()
        self.rest, self.over = self._head[end:], True
        return [self._begin(name), CallArguments(self._index, text)]

    def _fail(self) -> list[Part]:
        self.rest, self.over, self.failed = self._head, True, True
        return []


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
