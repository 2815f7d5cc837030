"""The OpenAPI document is whole and true: every endpoint is in it, and whatever is sent is answered as it says."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import BaseSchema
from starlette.routing import Route

from tests.gateway.conftest import Serve, Served
from trunkline.gateway.openapi import OPERATIONS, document

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
    return serve_module(max_choices=4, any_model=True)


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
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: "Case[Any]") -> None:
        response = case.call(base_url=str(shared.client.base_url), session=session, timeout=MOST_SECONDS)
        case.validate_response(response, checks=PROMISES)

    send()
    assert shared.executor.open_turns == 0
