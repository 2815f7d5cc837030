"""What turns that called tools really said.

A chat template writes an earlier call in its own way (other blanks, other key order, an id), which is not what the
model generated, and all that was computed behind it would be lost. So the text of such turns is kept, by the ids of
their calls; when a client sends the same calls back, the text is rendered instead.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from trunkline.wire.openai import Message
from trunkline.wire.outputs import Call

_ENTRY_BYTES = 500  # what an entry costs beside its text, roughly


@dataclass(frozen=True, slots=True)
class Said:
    """One turn that called tools. `text` is its answer as generated, calls and all; `content` what was shown of it.

    `lead` is the end of its prompt, if the answer followed directly (else empty).
    """

    text: str
    content: str
    thinking: str
    calls: tuple[Call, ...]
    lead: str

    def placed_behind(self, before: str) -> str:
        """`before` and the text, with the blanks between them that stood at the end of the prompt."""
        anchor, bare = self.lead.rstrip(), before.rstrip()
        fits = anchor and bare.endswith(anchor)
        return (bare + self.lead[len(anchor) :] if fits else before) + self.text


class CallMemory:
    """Bounded in bytes, forgets the least recently used. Belongs to salts. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._said: OrderedDict[tuple[str, str], Said] = OrderedDict()
        self._lock = Lock()

    def remember(self, salt: str, said: Said) -> None:
        """Keep a turn with at least one call."""
        key = salt, said.calls[0].id
        with self._lock:
            assert key not in self._said, "call ids are unique"
            self._said[key] = said
            self._bytes += _cost(said)
            while self._bytes > self._budget_bytes:
                self._bytes -= _cost(self._said.popitem(last=False)[1])

    def recall(self, salt: str, message: Message) -> Said | None:
        """What `message` repeats; None if it repeats no kept turn unchanged."""
        calls = message.tool_calls
        first = calls[0].get("id") if calls else None
        if not calls or not isinstance(first, str):
            return None
        with self._lock:
            said = self._said.get((salt, first))
            if said is None:
                return None
            self._said.move_to_end((salt, first))
        same = len(calls) == len(said.calls) and all(map(_same_call, calls, said.calls))
        return said if same and _same_text(message, said) else None


def _same_text(message: Message, said: Said) -> bool:
    """Blanks at the ends do not count, as most templates strip them. Thinking may be left out."""
    content = message.content if message.content is not None else ""
    thinking = message.reasoning_content or message.reasoning
    if not isinstance(content, str):
        content = "\n".join(part.text or "" for part in content)
    return content.strip() == said.content.strip() and (not thinking or thinking.strip() == said.thinking.strip())


def _same_call(sent: dict[str, Any], call: Call) -> bool:
    function = sent.get("function")
    if not isinstance(function, dict) or (sent.get("id"), function.get("name")) != (call.id, call.name):
        return False
    arguments = function.get("arguments")
    return arguments == call.arguments or _value(arguments) == _value(call.arguments)


def _value(arguments: Any) -> Any:
    """What arguments say, as text (1 and true are equal to Python): clients write the same JSON in other ways."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _cost(said: Said) -> int:
    texts: Sequence[str] = (said.text, said.content, said.thinking, *(call.arguments for call in said.calls))
    return _ENTRY_BYTES * (1 + len(said.calls)) + sum(len(text) for text in texts)
