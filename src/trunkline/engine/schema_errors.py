"""Where in a JSON schema the reason lies that a grammar was refused, and what `llguidance` would not enforce.

`llguidance` says what is wrong, but not always where. A part of a schema that is refused by itself with the same words
is where it is: it is looked for from the root down.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MOST_TRIES = 300
_SCHEMA = re.compile(r"%json\s*(?=[{])")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")


def explain(grammar: str, error: str, limits: LLParserLimits) -> str:
    """`llguidance`'s `error` about `grammar` in one line, with a JSON pointer to the part of the schema it is about."""
    what = _what(error)
    if "JSON schema" not in error:
        return what
    tries = iter(range(_MOST_TRIES))
    for schema in _schemas(grammar):
        where = _find(schema, "#", what, limits, tries)
        if where is not None:
            return f"{what} (at {where} of the schema)"
    return what


def unenforced(grammar: str) -> str | None:
    """A bound that the grammar would not keep, as an error; None if there is none.

    `llguidance` 1.9 lets a number be its own exclusive bound where both bounds lie between two neighbouring integers.
    """
    for schema in _schemas(grammar):
        for pointer, part in _walk(schema, "#"):
            for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
                bound = part.get(keyword)
                if isinstance(bound, int | float) and not isinstance(bound, bool) and _allows(part, bound):
                    fix = "give a bound that may be reached"
                    return f"{keyword} {bound} cannot be kept: {fix} (at {pointer} of the schema)"
    return None


def _allows(schema: dict[str, Any], number: float) -> bool:
    bounds = {key: value for key, value in schema.items() if key in _BOUNDS}
    matcher = LLMatcher(_bytes(), f"start: %json {json.dumps({'type': 'number', **bounds})}", log_level=0)
    text = str(int(number)) if number == int(number) else repr(number)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _walk(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield pointer, schema
    for name, part in _parts(schema):
        yield from _walk(part, f"{pointer}/{name}")


def _what(error: str) -> str:
    """The message without the position in our own grammar and the quoted line."""
    text = re.sub(r"\n\s*\d+ \|.*", "", error, flags=re.DOTALL)
    text = re.sub(r"^at \d+\(\d+\): ", "", text).removesuffix("<non-verbose/>").strip()
    return " ".join(text.removeprefix("failed to compile JSON schema: ").split())


def _schemas(grammar: str) -> Iterator[Any]:
    for place in _SCHEMA.finditer(grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, place.end())[0]
        except (ValueError, RecursionError):
            continue


def _find(schema: Any, pointer: str, what: str, limits: LLParserLimits, tries: Iterator[int]) -> str | None:
    """Pointer to the deepest part that is refused by itself with the same words; None if `schema` is not."""
    if next(tries, None) is None:
        return None
    error = LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=limits)
    if _what(error) != what:
        return None
    for name, part in _parts(schema):
        deeper = _find(part, f"{pointer}/{name}", what, limits, tries)
        if deeper is not None:
            return deeper
    return pointer


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for keyword in _NAMED:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            yield from ((f"{keyword}/{_escaped(name)}", part) for name, part in inner.items() if isinstance(part, dict))
    for keyword in _LISTED:
        inner = schema.get(keyword)
        if isinstance(inner, list):
            yield from ((f"{keyword}/{at}", part) for at, part in enumerate(inner) if isinstance(part, dict))
    for keyword in _SINGLE:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            yield keyword, inner


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
