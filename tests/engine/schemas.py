"""Seeded JSON schemas of the shapes that tools and the JSON-Schema test suite have, and answers under a grammar."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trunkline.engine.generation import Generation
from trunkline.engine.grammar import Grammars
from trunkline.engine.sampling import Logits
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Constraint, Sampling, TurnRequest

Schema = dict[str, Any]

NAMES = ("path", "query", "max_results", "unit", "file name", "naïve", "a/b", "_x", "$top", "", "Recipients", "日付")
WORDS = ("celsius", "fahrenheit", "read-only", "größer", "", 'say "hi"', "back\\slash", "a b", "😀", "tab\t")
PATTERNS = ("^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{4}$", "^(GET|POST|PUT)$", "^\\S+@\\S+$", "[A-Z]", "^x.*y$")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "uri")
UNUSUAL: tuple[Schema, ...] = (
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"type": "object", "patternProperties": {"^f": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "strng"},
    {"type": "string", "pattern": "(?=a)b"},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    {"type": "string", "format": "no-such-format"},
    {"$ref": "#/$defs/missing"},
    {"minimum": 5, "maximum": 3, "type": "integer"},
)
"""What `llguidance` may refuse, each with a message of its own."""


def random_schemas(count: int, seed: int = 0) -> Iterator[Schema]:
    """`count` schemas: objects as tools have them, and nested, bounded, chosen, named and unusual parts."""
    rng = random.Random(seed)
    for _ in range(count):
        schema = _object(rng, 0) if rng.random() < 0.7 else _any(rng, 0)
        if rng.random() < 0.15:
            schema = {"$defs": {"part": schema}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
        yield schema


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _number, _choice, _plain]
    if depth < 3:
        kinds += [_object, _array, _either]
    if rng.random() < 0.06:
        return rng.choice(UNUSUAL)
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth + 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    elif rng.random() < 0.4:
        schema["additionalProperties"] = _any(rng, 3)
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_any(rng, 3), _any(rng, 3)], "items": False, "minItems": 2}
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _string(rng: random.Random, depth: int) -> Schema:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 30}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 2:
            low = rng.randint(0, 5)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 20)}
        case _:
            return {"type": "string", "maxLength": 40}


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    match rng.randrange(4):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case 1:
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 0.5 + rng.random()}
        case 2:
            return {"type": "integer", "multipleOf": rng.randint(1, 12), "minimum": 0, "maximum": 10_000}
        case _:
            return {"type": "integer", "minimum": -(10**9), "maximum": 10**9}


def _choice(rng: random.Random, depth: int) -> Schema:
    values = [*rng.sample(WORDS, rng.randint(1, 4)), *rng.choice(([], [None, 3, 2.5, True], [{"a": [1]}]))]
    return {"const": values[0]} if rng.random() < 0.3 else {"enum": values}


def _plain(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        ({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "minimum": 0, "maximum": 99})
    )


def _either(rng: random.Random, depth: int) -> Schema:
    parts = [_any(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return {rng.choice(("anyOf", "anyOf", "allOf")): parts} if len(parts) > 1 else {"anyOf": parts}


class RandomLogits:
    """Rows of random logits that like to end strings and objects, so that an answer under any schema ends soon."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._bias = np.zeros(vocabulary.size, np.float32)
        for token, piece in enumerate(vocabulary.pieces):
            self._bias[token] = 8 * (len(piece) > 0 and not piece.strip(b'"}]@')) - 3 * piece.isspace()
        self._bias[list(vocabulary.end_tokens)] = 9

    def row(self) -> Logits:
        """The next row."""
        noise: Logits = self._rng.standard_normal(len(self._bias), np.float32)
        return 2 * noise + self._bias


def answer_under(
    grammars: Grammars, vocabulary: Vocabulary, constraint: Constraint, logits: RandomLogits, max_tokens: int = 4000
) -> tuple[str, Generation]:
    """What a turn under `constraint` says when the model's logits are noise. Raises `ConstraintError`."""
    request = TurnRequest(
        salt="",
        tokens=np.array([1], np.int32),
        text=None,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        constraint=constraint,
    )
    turn = Generation(request, vocabulary, grammars.guide(constraint))
    while turn.finished is None:
        turn.accept(logits.row())
    return turn.visible_text, turn
