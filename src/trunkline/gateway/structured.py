"""Structured answers: what `response_format` and vLLM's fields ask of the text, as a grammar rule."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trunkline.gateway.errors import InvalidRequest, InvalidType, MissingField, Unsupported
from trunkline.gateway.settings import GatewaySettings
from trunkline.gateway.tools.declared import check_schema
from trunkline.gateway.tools.lark import any_of, quoted, schema_rule
from trunkline.wire.openai import ChatBody, CompletionBody

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
MAX_CHOICES = 4096
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must match. `rules` define `answer`; or `grammar` is a whole grammar of the client's own.

    `schema` is the JSON schema behind the rules, if there is one.

    `kind` names it in statistics, `param` is the field to blame where it cannot be compiled.
    """

    kind: str
    param: str
    rules: str = ""
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None


def read_structure(body: ChatBody | CompletionBody, settings: GatewaySettings) -> Structure | None:
    """What `body` asks for; None for any text. Raises `InvalidRequest` or one of its kinds."""
    asked = [
        structure
        for structure in (
            _response_format(body.response_format, settings),
            _structured_outputs(body.structured_outputs, settings),
            *(_one(name, name, getattr(body, name), settings) for name in GUIDED),
        )
        if structure is not None
    ]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[0].param} and {asked[1].param} both shape the answer; send one.", param=asked[1].param
        )
    return asked[0] if asked else None


def _response_format(given: Mapping[str, Any] | None, settings: GatewaySettings) -> Structure | None:
    kind = "text" if given is None else given.get("type")
    if kind == "text" or given is None:
        return None
    if kind == "json_object":
        return _structure("json_object", "response_format", ANY_OBJECT)
    if kind != "json_schema":
        raise Unsupported(
            '`response_format.type` is not supported except "text", "json_object" and "json_schema".',
            param="response_format.type",
        )
    path = "response_format.json_schema"
    wrapped = given.get("json_schema")
    if wrapped is None:
        raise MissingField(f"`{path}` is required.", param=path)
    if not isinstance(wrapped, dict):
        raise InvalidType(f"`{path}`: expected an object.", param=path)
    return _json("json_schema", f"{path}.schema", wrapped.get("schema"), settings)


def _structured_outputs(given: Mapping[str, Any] | None, settings: GatewaySettings) -> Structure | None:
    wanted = [key for key, value in (given or {}).items() if value is not None and value is not False]
    if given is None or not wanted:
        return None
    if wanted == ["json_object"]:
        return _structure("json_object", "structured_outputs", ANY_OBJECT)
    kinds = [key for key in wanted if key in ("json", "regex", "choice", "grammar")]
    if len(kinds) != 1 or "json_object" in wanted:
        raise InvalidRequest(
            "structured_outputs takes one of json, regex, choice, grammar and json_object.", param="structured_outputs"
        )
    return _one(f"guided_{kinds[0]}", f"structured_outputs.{kinds[0]}", given[kinds[0]], settings)


def _one(name: str, param: str, given: Any, settings: GatewaySettings) -> Structure | None:
    """One of `GUIDED`, sent as `param`."""
    if given is None:
        return None
    if name == "guided_json":
        return _json("json_schema", param, _decoded(param, given), settings)
    if name == "guided_choice":
        return _choice(param, given)
    if not isinstance(given, str):
        raise InvalidType(f"`{param}`: expected a string.", param=param)
    if len(given) > settings.max_schema_bytes:
        raise InvalidRequest(f"{param} is over {settings.max_schema_bytes} characters long.", param=param)
    if name == "guided_regex":
        return Structure("regex", param, f"answer: ANSWER\nANSWER: {_regex(given)}\n")
    if "::=" in given:
        raise Unsupported(f"`{param}` is not supported in EBNF; write the grammar in Lark (`start: ...`).", param=param)
    return Structure("grammar", param, grammar=given)


def _json(kind: str, param: str, schema: Any, settings: GatewaySettings) -> Structure:
    return _structure(kind, param, check_schema(param, schema, settings))


def _structure(kind: str, param: str, schema: Mapping[str, Any]) -> Structure:
    return Structure(kind, param, f"answer: {schema_rule(schema)}\n", schema)


def _decoded(param: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}.", param=param) from None


def _choice(param: str, given: Any) -> Structure:
    if not isinstance(given, list) or not given or not all(isinstance(text, str) and text for text in given):
        raise InvalidType(f"`{param}`: expected a list of texts, none empty.", param=param)
    if len(given) > MAX_CHOICES:
        raise InvalidRequest(f"{param} has {len(given)} texts; at most {MAX_CHOICES}.", param=param)
    return Structure("choice", param, f"answer: {any_of([quoted(text) for text in given])}\n")


def _regex(pattern: str) -> str:
    """`pattern` between slashes, on one line."""
    inner = re.sub(r"\\.|/|\n", lambda sign: {"/": r"\/", "\n": r"\n"}.get(sign[0], sign[0]), pattern, flags=re.DOTALL)
    return f"/{inner}/"
