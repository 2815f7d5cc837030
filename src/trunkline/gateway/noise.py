"""Client noise: what changes from request to request and means nothing is held still, so that prefixes are found again.

Every piece of noise (`wire/noise.py`) is replaced by the value that was seen first at the same *place*. For text, a
place is all that comes before it in the system prompt, with the noise in it masked:

    x-anthropic-billing-header: cc_version=2.1.104.583; cc_entrypoint=sdk-cli; cch=1f3a9;
    |--------------- place of the first --------->|                               |
    |--------------- place of the second, the first masked ---------------------->|

So a value is only ever handed to a prompt that is the same up to there, which is where it can help; two prompts that
differ earlier never share one. For tool lists and JSON the place is the whole value, whatever its order. Values never
leave their salt, so no API key meets another's, and what no normalizer matched is never touched.
"""

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from trunkline.gateway.identity import scope_of
from trunkline.wire.noise import BILLING_TOKENS, DATE, Normalizer
from trunkline.wire.openai import Message

SCOPE_BYTES = 8 << 20
"""What one API key's first-seen values may take, roughly; the longest unused are forgotten."""

ENTRY_BYTES = 250
"""What an entry costs beside its value, roughly."""

MAX_JSON_CHARACTERS = 1 << 18
"""JSON over this length stays as it was sent."""

SYSTEM_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})


class Quiet(NamedTuple):
    """Messages and tools with the noise held still, and how many pieces each normalizer replaced."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    normalized: Mapping[str, int]


class NoiseFilter:
    """Holds the noise of chats still, as far as `enabled` says. Thread-safe."""

    def __init__(self, enabled: Iterable[Normalizer]) -> None:
        self._enabled = frozenset(enabled)
        self._seen = FirstSeen(SCOPE_BYTES)

    def settle(self, salt: str, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> Quiet:
        """What to render instead of `messages` and `tools`, which are not changed themselves."""
        counts: Counter[str] = Counter()
        if Normalizer.BILLING in self._enabled:
            walk = _SystemText(salt, Normalizer.BILLING, _billing, self._seen, counts)
            messages = [walk.message(message) if at == 0 else message for at, message in enumerate(messages)]
        if Normalizer.DATES in self._enabled:
            walk = _SystemText(salt, Normalizer.DATES, _dates, self._seen, counts)
            messages = [walk.message(message) for message in messages]
        if Normalizer.JSON_KEYS in self._enabled:
            keys = _KeyOrder(salt, self._seen, counts)
            messages = [keys.message(message) for message in messages]
            tools = None if tools is None else [keys.value(tool) for tool in tools]
        if Normalizer.TOOL_ORDER in self._enabled and tools:
            tools = _in_first_order(salt, tools, self._seen, counts)
        return Quiet(messages, tools, counts)


class FirstSeen:
    """The first value seen at each place, LRU within a scope's budget. Thread-safe.

    Every scope has a budget of its own, so that one API key's traffic never makes the server forget another's.
    """

    def __init__(self, scope_bytes: int) -> None:
        self._scope_bytes = scope_bytes
        self._values: defaultdict[str, OrderedDict[bytes, str]] = defaultdict(OrderedDict)
        self._bytes: Counter[str] = Counter()
        self._lock = Lock()

    def value(self, salt: str, place: bytes, value: str) -> str:
        """The value first seen at `place`, which is `value` if nothing is remembered there."""
        scope = scope_of(salt)
        with self._lock:
            values = self._values[scope]
            known = values.get(place)
            if known is not None:
                values.move_to_end(place)
                return known
            values[place] = value
            self._bytes[scope] += ENTRY_BYTES + len(value)
            while self._bytes[scope] > self._scope_bytes:
                _, forgotten = values.popitem(last=False)
                self._bytes[scope] -= ENTRY_BYTES + len(forgotten)
        return value

    def held_bytes(self, scope: str) -> int:
        """What a scope's values take, roughly."""
        return self._bytes[scope]


# --- text -------------------------------------------------------------------------------------------------------------


class _Noise(NamedTuple):
    """One piece of noise in a text; `name` stands for it where places are compared."""

    name: str
    start: int
    end: int


class _SystemText:
    """Replaces noise in the system's texts of one chat, which must come in order."""

    def __init__(
        self,
        salt: str,
        normalizer: Normalizer,
        find: Callable[[str, bool], Iterable[_Noise]],
        seen: FirstSeen,
        counts: Counter[str],
    ) -> None:
        self._salt, self._normalizer, self._find = salt, normalizer, find
        self._seen, self._counts = seen, counts
        self._place = _hash(salt, normalizer)
        self._first = True

    def message(self, message: Message) -> Message:
        """`message` with its noise replaced, if it is the system's."""
        return _with_texts(message, self._text) if message.role in SYSTEM_ROLES else message

    def _text(self, text: str) -> str:
        parts, at = [], 0
        for noise in self._find(text, self._first):
            before, sent = text[at : noise.start], text[noise.start : noise.end]
            self._place.update(_bytes(f"{before}\0{noise.name}\0"))
            value = self._seen.value(self._salt, self._place.digest(), sent)
            if value != sent:
                self._counts[self._normalizer] += 1
            parts += [before, value]
            at = noise.end
        self._place.update(_bytes(f"{text[at:]}\0"))
        self._first = False
        return "".join([*parts, text[at:]])


def _billing(text: str, first: bool) -> Iterator[_Noise]:
    """Listed billing tokens; they stand in the first line of the first text only."""
    if not first:
        return
    found = [
        _Noise(token.name, *noise.span(1))
        for token in BILLING_TOKENS
        if (line := token.line.match(text))
        for noise in token.pattern.finditer(text, 0, line.end())
    ]
    yield from sorted(found, key=lambda noise: noise.start)


def _dates(text: str, first: bool) -> Iterator[_Noise]:
    return (_Noise("date", *match.span()) for match in DATE.finditer(text))


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    content = message.content
    if content is None:
        return message
    if isinstance(content, str):
        return msgspec.structs.replace(message, content=change(content))
    parts = [part if part.text is None else msgspec.structs.replace(part, text=change(part.text)) for part in content]
    return msgspec.structs.replace(message, content=parts)


# --- order ------------------------------------------------------------------------------------------------------------


class _KeyOrder:
    """Gives the objects of JSON values the key order in which the same value was seen first."""

    def __init__(self, salt: str, seen: FirstSeen, counts: Counter[str]) -> None:
        self._salt, self._seen, self._counts = salt, seen, counts

    def message(self, message: Message) -> Message:
        """`message` with the arguments of its calls, or the result it carries, in the first order."""
        if message.tool_calls:
            message = msgspec.structs.replace(message, tool_calls=[self._call(call) for call in message.tool_calls])
        return _with_texts(message, self._text) if message.role in RESULT_ROLES else message

    def value(self, value: Any) -> Any:
        """A JSON value (not text) in the first order."""
        try:
            canonical, sent = _canonical(value), json.dumps(value)
        except RecursionError:  # refused later, where the template renders it
            return value
        if len(sent) > MAX_JSON_CHARACTERS:
            return value
        first = self._seen.value(self._salt, _hash(self._salt, Normalizer.JSON_KEYS, canonical).digest(), sent)
        if first == sent:
            return value
        self._counts[Normalizer.JSON_KEYS] += 1
        return json.loads(first)

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        given = function["arguments"]
        arguments = self._text(given) if isinstance(given, str) else self.value(given)
        return {**call, "function": {**function, "arguments": arguments}}

    def _text(self, text: str) -> str:
        """JSON text in the first order, written as it was; any other text as it is."""
        body = text.strip()
        if body[:1] not in ("{", "[") or len(body) > MAX_JSON_CHARACTERS:
            return text
        try:
            value = json.loads(body)
            style = next((style for style in _styles(body) if json.dumps(value, **style) == body), None)
        except (ValueError, RecursionError):
            return text
        # What cannot be written again letter by letter (doubled keys, odd numbers or blanks) is left alone.
        return text if style is None else text.replace(body, json.dumps(self.value(value), **style), 1)


def _styles(body: str) -> Iterator[dict[str, Any]]:
    """How `body` may have been written, likeliest first, as options of `json.dumps`."""
    ascii_only = body.isascii()
    if body[1:2] == "\n":
        blanks = body[2 : len(body) - len(body[2:].lstrip(" \t"))]
        yield {"indent": blanks, "ensure_ascii": ascii_only}
        return
    yield {"ensure_ascii": ascii_only}
    yield {"separators": (",", ":"), "ensure_ascii": ascii_only}


def _in_first_order(
    salt: str, tools: list[dict[str, Any]], seen: FirstSeen, counts: Counter[str]
) -> list[dict[str, Any]]:
    """`tools` in the order in which the same tools were seen first."""
    try:
        named = [(_hash(_canonical(tool)).hexdigest(), tool) for tool in tools]
    except RecursionError:  # refused later, where the template renders them
        return tools
    sent = [name for name, _ in named]
    place = _hash(salt, Normalizer.TOOL_ORDER, *sorted(sent)).digest()
    first = seen.value(salt, place, " ".join(sent)).split()
    if first == sent:
        return tools
    counts[Normalizer.TOOL_ORDER] += 1
    by_name = dict(named)  # the same tool twice is twice the same
    return [by_name[name] for name in first]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(*parts: str) -> "blake2b":
    """A hash of parts that no other parts give, to go on with."""
    state = blake2b(digest_size=16)
    for part in parts:
        data = _bytes(part)
        state.update(len(data).to_bytes(8) + data)
    return state


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
