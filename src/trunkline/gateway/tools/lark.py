r"""Pieces of grammar in the Lark dialect of `llguidance`.

JSON is generated as `json.dumps` writes it (`{"a": 1, "b": [2]}`): chat templates render earlier calls that way, so
that a generated call reads the same in the next turn's prompt. One spelling only also makes most punctuation forced.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

ANY = r"/(.|\n)*/"
"""Any text. It matches no control token."""

_ANNOTATIONS = frozenset(
    {"description", "title", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_DATA = frozenset({"enum", "const"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def schema_rule(schema: Mapping[str, Any]) -> str:
    """What matches the JSON values of `schema`, which keeps its order of properties."""
    return "%json " + json.dumps({**bare(schema), "x-guidance": JSON_STYLE}, ensure_ascii=False)


def bare(schema: Any) -> Any:
    """`schema` without what says nothing about the values it accepts: grammars stay small."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS or key == "x-guidance":
            continue
        if key in _DATA:
            kept[key] = value
        elif key in _NAMED and isinstance(value, dict):
            kept[key] = {name: bare(part) for name, part in value.items()}
        else:
            kept[key] = bare(value)
    return kept


def moved(schema: Any, root: str) -> Any:
    """`schema` as a part of another, where `root` points to it."""
    if isinstance(schema, list):
        return [moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else moved(value, root)
        for key, value in schema.items()
        if key not in ("$schema", "$id") or not isinstance(value, str)
    }


def any_of(expressions: Sequence[str]) -> str:
    """One of several."""
    return " | ".join(expressions)


class Marker:
    """A fixed text that means something to a model: a control token where the vocabulary has one, else letters."""

    def __init__(self, text: str, control: Mapping[str, int]) -> None:
        """`control` names the control tokens among the markers."""
        self.text = text
        self._token = control.get(text)

    @property
    def is_control(self) -> bool:
        """Whether letters never make it."""
        return self._token is not None

    @property
    def rule(self) -> str:
        """What matches it."""
        return quoted(self.text) if self._token is None else f"<[{self._token}]>"
