"""The OpenAPI 3.1 document of every endpoint: made from the routes that are served and the structs that they decode.

`OPERATIONS` says of each route what it takes and gives. A route without an entry, or an entry without a route, is a
programmer's error that building the document finds, so the document cannot drift from what is served.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trunkline import __version__
from trunkline.gateway.errors import ANTHROPIC_PATH
from trunkline.gateway.facets import add_facets
from trunkline.gateway.identity import FINAL_HEADERS, PARENT_HEADERS, RUN_HEADER
from trunkline.wire import anthropic, openai, records, responses

JSON, EVENTS = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/"
PACKAGE = "trunkline.wire."

Parameter = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one path takes and gives.

    `body` and `reply` are structs (`reply` None: text). `open` paths want no key. A `generation` streams if it is asked
    to, and takes the headers that name a run.
    """

    does: str
    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    reply: type[msgspec.Struct] | None
    status: int = 200
    query: tuple[Parameter, ...] = ()
    generation: bool = False
    open: bool = False


def _query(name: str, schema: Mapping[str, Any]) -> Parameter:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _header(name: str, schema: Mapping[str, Any], description: str) -> Parameter:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


_ID = {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[!-~]([ -~]*[!-~])?$"}

EVENT = {
    "description": "If `stream` is true: one server-sent event. Its data is JSON, or `[DONE]`.",
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

RUN_HEADERS = (
    _header(RUN_HEADER, _ID, "The run that this turn belongs to."),
    _header(PARENT_HEADERS[0], _ID, "The run that it was forked from."),
    _header(FINAL_HEADERS[0], {"enum": ["true", "false"]}, "Whether the run ends with this turn."),
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        does="Continue a chat", body=openai.ChatBody, reply=openai.ChatCompletion, generation=True
    ),
    ("POST", "/v1/completions"): Operation(
        does="Continue a text", body=openai.CompletionBody, reply=openai.Completion, generation=True
    ),
    ("POST", "/v1/responses"): Operation(
        does="Create a response", body=responses.ResponsesBody, reply=responses.ResponseObject, generation=True
    ),
    ("GET", "/v1/responses/{id}"): Operation(does="Show a stored response", reply=responses.ResponseObject),
    ("DELETE", "/v1/responses/{id}"): Operation(does="Forget a response", reply=responses.ResponseDeleted),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        does="List what a response was asked with",
        reply=responses.ItemList,
        query=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            _query("order", {"enum": ["asc", "desc"]}),
            _query("after", {"type": "string"}),
        ),
    ),
    ("POST", "/v1/messages"): Operation(
        does="Create a message", body=anthropic.MessagesBody, reply=anthropic.MessageReply, generation=True
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        does="Count a message's tokens", body=anthropic.CountTokensBody, reply=anthropic.TokenCount
    ),
    ("GET", "/v1/models"): Operation(does="List the served model", reply=openai.ModelList),
    ("GET", "/v1/models/{id}"): Operation(does="Show a model", reply=openai.ModelCard),
    ("POST", "/tokenize"): Operation(does="Tokenize", body=openai.TokenizeBody, reply=openai.TokenizeReply),
    ("POST", "/detokenize"): Operation(does="Detokenize", body=openai.DetokenizeBody, reply=openai.DetokenizeReply),
    ("GET", "/health"): Operation(does="Say whether generation works", reply=openai.Health, open=True),
    ("GET", "/metrics"): Operation(does="Give Prometheus metrics", reply=None, open=True),
    ("GET", "/openapi.json"): Operation(does="Give this document", reply=openai.OpenApi),
    ("POST", "/reset_prefix_cache"): Operation(does="Forget cached prefixes", reply=openai.Done),
    ("POST", "/v1/runs"): Operation(
        does="Declare a run",
        body=openai.DeclareRunBody,
        body_required=False,
        reply=records.RunView,
        status=201,
    ),
    ("GET", "/v1/runs"): Operation(
        does="List runs",
        reply=records.RunList,
        query=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}),
            _query("before", {"type": "string"}),
        ),
    ),
    ("POST", "/v1/runs/{id}/finish"): Operation(does="Say that a run is over", reply=records.RunView),
    ("GET", "/v1/runs/{id}"): Operation(does="Show a run, turn by turn", reply=records.RunView),
}
"""By method and path (as OpenAPI writes it)."""


class OpenApi:
    """Serves the document of the routes that it is given."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._document: bytes | None = None

    async def show(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        if self._document is None:
            self._document = msgspec.json.encode(document(self._routes))
        return Response(self._document, media_type=JSON)


def served(routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    """(method, path) of everything in `routes`, as `OPERATIONS` names it. `HEAD` goes with `GET`."""
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path.replace(":path}", "}")


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI document of `routes`. Asserts that they are those of `OPERATIONS`."""
    names = list(served(routes))
    assert set(names) == OPERATIONS.keys(), set(names) ^ OPERATIONS.keys()
    structs = {struct for operation in OPERATIONS.values() for struct in (operation.body, operation.reply) if struct}
    structs |= {openai.ErrorBody, anthropic.ErrorBody}
    ordered = sorted(structs, key=lambda struct: (struct.__module__, struct.__name__))
    found, components = msgspec.json.schema_components(ordered, ref_template=REFERENCE + "{name}")
    schemas = dict(zip(ordered, found, strict=True))
    generating = [operation.body for operation in OPERATIONS.values() if operation.generation]
    add_facets(components, frozenset(struct.__name__ for struct in generating if struct is not None))
    paths: dict[str, dict[str, Any]] = {}
    for method, path in names:
        paths.setdefault(path, {})[method.lower()] = _operation(path, OPERATIONS[method, path], schemas)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "Trunkline", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    short: dict[str, Any] = _short_names(whole, frozenset(components))
    return short


def _operation(path: str, operation: Operation, schemas: Mapping[type[msgspec.Struct], Any]) -> dict[str, Any]:
    parameters = [*operation.query, *(RUN_HEADERS if operation.generation else ())]
    if "{id}" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    media = {JSON: {"schema": schemas[operation.reply]}} if operation.reply else {"text/plain": {}}
    if operation.generation:
        media[EVENTS] = {"schema": EVENT}
    refused = schemas[anthropic.ErrorBody if path.startswith(ANTHROPIC_PATH) else openai.ErrorBody]
    error = {"content": {JSON: {"schema": refused}}}
    described: dict[str, Any] = {
        "summary": operation.does,
        "responses": {
            str(operation.status): {"description": "It was done.", "content": media},
            "4XX": {"description": "The request is at fault; the message names the fix.", **error},
            "5XX": {"description": "The server is not ready, or failed.", **error},
        },
        # An empty requirement: whether a key is wanted is the server's setting.
        "security": [] if operation.open else [{}, {"bearer": []}, {"key": []}],
    }
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        body = {JSON: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": operation.body_required, "content": body}
    return described


def _short_names(node: Any, names: frozenset[str]) -> Any:
    """`node` with schemas called by their module's name where two share one (`openai.ErrorBody`), not by its path."""
    if isinstance(node, dict):
        return {_short(key) if key in names else key: _short_names(value, names) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_short_names(value, names) for value in node]
    return _short(node) if isinstance(node, str) and node.startswith(REFERENCE) else node


def _short(name: str) -> str:
    return name.replace(PACKAGE, "")
