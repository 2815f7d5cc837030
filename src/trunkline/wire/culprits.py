"""What made a prompt leave the prefix that it should have shared: names the likely culprit from the two texts.

Pure functions of text. A culprit is a guess by what stands where the texts part; `Culprit` says what each means.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from trunkline.wire.noise import BILLING_TOKENS, DATE
from trunkline.wire.records import DiffRow


class Culprit(StrEnum):
    """The likely cause of a difference."""

    TOKENS = "tokens"
    BILLING = "billing"
    TIMESTAMP = "timestamp"
    IDENTIFIER = "identifier"
    NUMBER = "number"
    WHITESPACE = "whitespace"
    TOOL_ORDER = "tool_order"
    JSON_KEYS = "json_keys"
    COMPACTION = "compaction"
    EDITED = "edited"


ADVICE = {
    Culprit.TOKENS: "the same text in other tokens: nothing was edited",
    Culprit.BILLING: "a billing token; `--normalize billing` holds it still",
    Culprit.TIMESTAMP: "a date or time; keep it out of the front of the prompt, or see `--normalize dates`",
    Culprit.IDENTIFIER: "an id or a hash that changes; keep it out of the front of the prompt",
    Culprit.NUMBER: "a number that changes; keep it out of the front of the prompt",
    Culprit.WHITESPACE: "white space only: something trims or reformats what was sent before",
    Culprit.TOOL_ORDER: "the tools come in another order; sort them, or see `--normalize tool_order`",
    Culprit.JSON_KEYS: "JSON keys come in another order; sort them, or see `--normalize json_keys`",
    Culprit.COMPACTION: "the history was rewritten much shorter, as agents do when their context fills up",
    Culprit.EDITED: "the text itself was changed",
}
"""What each culprit is, and what can be done about it."""

COMPACTED_TOKENS = 512
"""What loses less than this was not compacted but edited."""

SHOWN_BEFORE, SHOWN, SHOWN_AFTER = 160, 320, 80
"""Most characters shown before the difference, of each side, and of what follows on both."""

WORDS = 4
"""So many equal words in a row end a difference."""

_IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|(?<![\w-])(?=[\w-]*\d)(?:[0-9a-fA-F]{6,}|(?=[\w-]*[A-Za-z])[\w-]{10,})(?![\w-])"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?!\w)")
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,128})"')
_KEY = re.compile(r'"((?:[^"\\\n]|\\.){1,128})"\s*:')


class _Sides(NamedTuple):
    """The two whole texts, and where they part."""

    was: str
    now: str
    at: int

    def both(self, pattern: re.Pattern[str]) -> bool:
        """Whether the texts part inside a match of `pattern`, on both sides."""
        return self._inside(pattern, self.was) and self._inside(pattern, self.now)

    def _inside(self, pattern: re.Pattern[str], text: str) -> bool:
        line = text.rfind("\n", 0, self.at) + 1
        end = text.find("\n", self.at)
        found = pattern.finditer(text, line, len(text) if end < 0 else end)
        return any(match.start() <= self.at <= match.end() for match in found)

    def tails(self) -> tuple[str, str]:
        """Both texts from a little before they part, so that a word or a key is whole."""
        start = max(0, self.at - SHOWN_AFTER)
        return self.was[start:], self.now[start:]


def explain_difference(
    *,
    run: str,
    at_token: int,
    before: str,
    was: str,
    now: str,
    was_tokens: int,
    now_tokens: int,
    compacted: bool = False,
) -> DiffRow:
    """The record of a difference: both texts cut to what differs, and the likely culprit.

    `before` is the end of what both share; `was` followed there, `now` follows in the prompt, `was_tokens` and
    `now_tokens` say how much in all. `compacted` says that the core took the turn for a compaction.
    """
    same = _common_head(was, now)
    sides = _Sides(before + was, before + now, len(before) + same)
    compacted |= was_tokens >= COMPACTED_TOKENS and now_tokens < was_tokens // 2
    culprit = _culprit(sides, compacted)
    of_was, of_now = _until_equal_again(was[same:], now[same:])
    after = now[same + of_now : same + of_now + SHOWN_AFTER]
    return DiffRow(
        run=run,
        at_token=at_token,
        before=(before + was[:same])[-SHOWN_BEFORE:],
        was=was[same : same + min(of_was, SHOWN)],
        now=now[same : same + min(of_now, SHOWN)],
        after=after if max(of_was, of_now) <= SHOWN else "",
        was_tokens=was_tokens,
        now_tokens=now_tokens,
        culprit=culprit,
    )


def _culprit(sides: _Sides, compacted: bool) -> Culprit:
    """The first of the culprits, from the surest to the vaguest, that fits."""
    if sides.at >= min(len(sides.was), len(sides.now)):
        return Culprit.TOKENS
    if _in_billing_token(sides):
        return Culprit.BILLING
    for culprit, pattern in ((Culprit.TIMESTAMP, DATE), (Culprit.IDENTIFIER, _IDENTIFIER), (Culprit.NUMBER, _NUMBER)):
        if sides.both(pattern):
            return culprit
    if _differ_in_blanks(sides.was[sides.at :], sides.now[sides.at :]):
        return Culprit.WHITESPACE
    was, now = sides.tails()
    if _reordered(_TOOL_NAME.findall(was), _TOOL_NAME.findall(now)):
        return Culprit.TOOL_ORDER
    if _permuted(_KEY.findall(was), _KEY.findall(now)):
        return Culprit.JSON_KEYS
    return Culprit.COMPACTION if compacted else Culprit.EDITED


def _in_billing_token(sides: _Sides) -> bool:
    return any(sides.both(token.line) and sides.both(token.pattern) for token in BILLING_TOKENS)


def _differ_in_blanks(was: str, now: str) -> bool:
    """Whether one side has white space where the other has not, and both go on alike for a while."""
    ours, theirs = (re.sub(r"\s+", "", text)[:SHOWN_AFTER] for text in (was, now))
    length = min(len(ours), len(theirs))
    return (was[0].isspace() or now[0].isspace()) and ours[:length] == theirs[:length]


def _reordered(was: list[str], now: list[str]) -> bool:
    """Whether what both have comes in another order."""
    common = set(was) & set(now)
    return [name for name in was if name in common] != [name for name in now if name in common] and len(common) > 1


def _permuted(was: list[str], now: list[str]) -> bool:
    """Whether the two begin with the same few keys in another order."""
    most = min(len(was), len(now), 64)
    return any(
        was[:count] != now[:count] and sorted(was[:count]) == sorted(now[:count]) for count in range(2, most + 1)
    )


def _until_equal_again(was: str, now: str) -> tuple[int, int]:
    """How many characters of each differ before both go on with the same words (all, if they never do)."""
    ours, theirs = list(_WORD.finditer(was)), list(_WORD.finditer(now))
    places: dict[tuple[str, ...], int] = {}
    for at in range(len(ours) - WORDS + 1):
        places.setdefault(tuple(word[0] for word in ours[at : at + WORDS]), ours[at].start())
    for at in range(len(theirs) - WORDS + 1):
        place = places.get(tuple(word[0] for word in theirs[at : at + WORDS]))
        if place is not None:
            return place, theirs[at].start()
    return len(was), len(now)


def _common_head(a: str, b: str) -> int:
    length = min(len(a), len(b))
    return next((at for at in range(length) if a[at] != b[at]), length)
