"""The OpenAPI document is whole and true: every endpoint is in it, and whatever is sent is answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import BaseSchema
from starlette.routing import Route

from tests.gateway.conftest import Serve, Served
from tests.gateway.test_edge import APIS
from trunkline.gateway.facets import GENERATION
from trunkline.gateway.openapi import OPERATIONS, document
from trunkline.wire.openai import ChatBody

EXAMPLES = 25
"""Requests for each operation and each kind (allowed by the document, or not)."""

MOST_SECONDS = 10
"""No answer may take longer: it would be a hang."""

load_all_checks()
PROMISES: Any = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    ]
)


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    served = serve_module(any_model=True)
    served.executor.context = 2**40
    return served


@pytest.fixture(scope="module")
def schema(shared: Served) -> BaseSchema:
    return schemathesis.openapi.from_dict(shared.client.get("/openapi.json").json())


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


def test_every_endpoint_is_described(gateway: Served) -> None:
    described = gateway.client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == set(OPERATIONS)


def test_a_route_that_is_not_described_is_found(gateway: Served) -> None:
    routes = [route for route in gateway.app.routes if isinstance(route, Route)]
    document(routes)
    with pytest.raises(AssertionError, match="/new"):
        document([*routes, Route("/new", routes[-1].endpoint)])
    with pytest.raises(AssertionError, match="completions"):
        document(routes[1:])


NEEDED = {"messages", "prompt", "input", "max_tokens", "tokens"}


def thinned(body: dict[str, Any], kept: set[int]) -> dict[str, Any]:
    """`body` with a few of its optional fields: with all of them, one is always at odds with the rest."""
    optional = sorted(body.keys() - NEEDED)
    few = {optional[at] for at in kept if at < len(optional)}
    return {name: value for name, value in body.items() if name in NEEDED or name in few}


KINDS = [
    pytest.param(method, path, mode, id=f"{method} {path} {mode.value}")
    for (method, path), operation in OPERATIONS.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or operation.body or operation.query  # else there is nothing to get wrong
]


@pytest.mark.parametrize(("method", "path", "mode"), KINDS)
def test_whatever_is_sent_is_answered_as_the_document_says(
    shared: Served, schema: BaseSchema, session: requests.Session, method: str, path: str, mode: GenerationMode
) -> None:
    @given(case=schema[path][method].as_strategy(generation_mode=mode), kept=st.sets(st.integers(0, 40), max_size=4))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: "Case[Any]", kept: set[int]) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = thinned(case.body, kept)
        response = case.call(base_url=str(shared.client.base_url), session=session, timeout=MOST_SECONDS)
        case.validate_response(response, checks=PROMISES)

    send()
    assert shared.executor.open_turns == 0


CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", ["hello", CALL])
def test_what_is_served_is_as_the_document_says(
    shared: Served, schema: BaseSchema, session: requests.Session, path: str, stream: bool, reply: str
) -> None:
    api = APIS[path]
    shared.executor.reply = reply
    tools = {} if api.tool is None else {"tools": [api.tool("look", LOOK)]}
    body = api.hi(stream=stream, **tools)
    if "max_tokens" in body:
        body["max_tokens"] = 200
    case = schema[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(base_url=str(shared.client.base_url), session=session, timeout=MOST_SECONDS)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=PROMISES)


BOUNDS = [
    (field, value, step)
    for field, facet in GENERATION.items()
    for value, step in ((facet.get("minimum"), -1), (facet.get("maximum"), 1))
    if value is not None and field in {*ChatBody.__struct_fields__}
]


@pytest.mark.parametrize(("field", "value", "step"), BOUNDS)
def test_a_documented_bound_is_the_last_value_that_is_served(
    shared: Served, field: str, value: float, step: int
) -> None:
    fields: dict[str, Any] = {"logprobs": True} if field == "top_logprobs" else {}
    assert shared.chat("hi", **fields, **{field: value}).status_code == 200
    assert shared.chat("hi", **fields, **{field: value + step}).status_code == 400
