r"""What counts as noise in a prompt: text that changes from request to request and means nothing, or little.

`gateway/noise.py` replaces it where a setting says so, `wire/culprits.py` names it where it broke a prefix. Both go by
the lists of this module and by nothing else.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class Normalizer(StrEnum):
    """The normalizers, by the names that settings, records and metrics use."""

    BILLING = "billing"
    """The listed billing tokens (`BILLING_TOKENS`). They mean nothing to a model: on by default."""
    DATES = "dates"
    """Dates and times in system prompts (`DATE`). They are meaning: the model is told the first-seen one."""
    TOOL_ORDER = "tool_order"
    """The order of the tool list."""
    JSON_KEYS = "json_keys"
    """The order of keys in tool definitions, in tool calls' arguments and in tool results that are JSON."""


DEFAULT = (Normalizer.BILLING,)
"""What is held still unless a setting says otherwise."""


@dataclass(frozen=True, slots=True)
class BillingToken:
    """One billing token: who sends it, the line it stands in, and its pattern there (group 1 is what changes)."""

    name: str
    sender: str
    line: re.Pattern[str]
    pattern: re.Pattern[str]


_ANTHROPIC_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*")

BILLING_TOKENS = (
    BillingToken(
        "cch",
        "Claude Code and the Claude Agent SDK: a hash of the request",
        _ANTHROPIC_LINE,
        re.compile(r"\bcch=([0-9A-Za-z_-]{1,64});"),
    ),
    BillingToken(
        "cc_version",
        "Claude Code and the Claude Agent SDK: a fingerprint of the first message behind the version",
        _ANTHROPIC_LINE,
        re.compile(r"\bcc_version=\d+\.\d+\.\d+\.([0-9a-f]{3});"),
    ),
)
"""All billing tokens there are. Each stands in the first line of the first system message."""


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_ZONE = r"(?:Z|UTC|GMT|CES?T|[ECMP][SD]T|BST|IST|JST|(?:UTC|GMT)?[+-]\d{2}:?\d{2})"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d{1,9})?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
_TIME = rf"{_CLOCK}(?:\s?{_ZONE}\b)?"
_AND_TIME = rf"(?:(?:,?\s+(?:at\s+)?|T){_TIME})?"

DATE = re.compile(
    r"(?<![\w.:/-])(?:"
    + "|".join(
        (
            rf"\d{{4}}-\d{{2}}-\d{{2}}{_AND_TIME}",  # 2026-11-30, 2026-11-30T09:10:05Z
            rf"\d{{4}}/\d{{1,2}}/\d{{1,2}}{_AND_TIME}",
            rf"\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}}{_AND_TIME}",
            rf"(?:{_DAY},?\s+)?{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}{_AND_TIME}",  # November 30, 2026
            rf"(?:{_DAY},?\s+)?\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH},?\s+\d{{4}}{_AND_TIME}",  # Mon, 30 Nov 2026 09:10
            rf"{_DAY}\s+{_MONTH}\s+\d{{1,2}}\s+{_TIME}(?:\s+\d{{4}})?",  # Mon Nov 30 09:10:05 UTC 2026
            _TIME,
            r"1[6-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?",  # seconds or milliseconds since 1970
        )
    )
    + r")(?![\w:/-]|\.\d)"
)
"""A date, a time, or both."""
