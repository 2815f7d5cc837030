"""What the structs of requests do not say and the gateway checks: ranges and choices, as OpenAPI writes them.

Documentation only: the checks themselves are in `params.py` and the translations. A test sends each bound, and what
lies beyond it.
"""

from typing import Any

from trunkline.gateway.messages import ROLES
from trunkline.gateway.params import MAX_TOKENS
from trunkline.gateway.responses import translate
from trunkline.gateway.settings import GatewaySettings

_DEFAULTS = GatewaySettings()


def _between(low: float, high: float) -> dict[str, Any]:
    return {"minimum": low, "maximum": high}


GENERATION: dict[str, dict[str, Any]] = {
    "temperature": _between(0, 100),
    "top_p": _between(0, 1),
    "min_p": _between(0, 1),
    "top_k": _between(-1, MAX_TOKENS),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "repetition_penalty": _between(0.01, 100),
    "max_tokens": _between(1, MAX_TOKENS),
    "max_completion_tokens": _between(1, MAX_TOKENS),
    "max_output_tokens": _between(1, MAX_TOKENS),
    "top_logprobs": _between(0, _DEFAULTS.max_top_logprobs),
    "messages": {"minItems": 1},
    "n": _between(1, _DEFAULTS.max_choices),
}
"""Of every struct that a generating endpoint decodes, by field."""

OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("Message", "role"): {"enum": sorted(ROLES)},
    ("ContentPart", "type"): {"enum": ["text"]},
    ("InputMessage", "role"): {"enum": ["assistant", "system", "user"]},
    ("Item", "role"): {"enum": [*sorted(translate.ROLES), None]},
    ("Item", "type"): {"enum": ["message", "function_call", "function_call_output", "reasoning", None]},
    ("ItemPart", "type"): {"enum": sorted(translate.TEXT_PARTS)},
    ("DeclareRunBody", "expected_turns"): _between(1, 1_000_000),
}
"""Of one struct, by its schema's name and the field."""


def add_facets(schemas: dict[str, dict[str, Any]], generating: frozenset[str]) -> None:
    """Write the facets into component schemas. `generating` names those that generating endpoints decode."""
    for name in sorted(generating):
        for field, facet in GENERATION.items():
            if field in schemas[name]["properties"]:
                schemas[name]["properties"][field] |= facet
    for (name, field), facet in OTHERS.items():
        schemas[name]["properties"][field] |= facet
